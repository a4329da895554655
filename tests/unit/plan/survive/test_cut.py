"""Cuts into stages: Oobleck's vectors, every cut of small models, memory, and size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.plan.survive.cut import CutModel, find_cut
from bigsci_launch.plan.survive.schedule import StageTime

SECONDS = st.sampled_from([0.5, 1.0, 1.0, 2.0, 5.0, 9.0])


def model_of(layers: list[tuple[float, float]], limits: list[int] | None = None, hop: float = 0.0) -> CutModel:
    most = len(layers)
    return CutModel(
        tuple(StageTime(*layer) for layer in layers), lambda stage, stages: limits[stage] if limits else most, hop
    )


@pytest.mark.parametrize(
    ("num_stages", "counts", "seconds"),
    [
        (1, (6,), 168),
        (2, (4, 2), 196),
        (3, (3, 2, 1), 234),
        (4, (3, 1, 1, 1), 222),
        (5, None, 270),
        (6, None, 318),
    ],
)
def test_growing_layers_are_cut_as_in_the_rust_tests(
    num_stages: int, counts: tuple[int, ...] | None, seconds: float
) -> None:
    """Six layers of 2, 4, .. 12 seconds and four micro batches per stage, as Oobleck's Rust code of 2024 tests them."""
    cut = find_cut(model_of([(index + 1.0, index + 1.0) for index in range(6)]), num_stages, 4 * num_stages)
    assert cut is not None
    assert cut.seconds == seconds
    assert counts is None or cut.counts == counts


@pytest.mark.parametrize(("num_stages", "seconds"), list(enumerate([48, 54, 56, 68, 80, 58], start=1)))
def test_equal_layers(num_stages: int, seconds: float) -> None:
    cut = find_cut(model_of([(1.0, 1.0)] * 6), num_stages, 4 * num_stages)
    assert cut is not None
    assert cut.seconds == seconds


@given(
    st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.25]),
)
def test_no_cut_of_a_small_model_is_faster(
    best_of_all_cuts: Callable[..., float | None],
    layers: list[tuple[float, float]],
    limits: list[int],
    num_micro_batches: int,
    hop: float,
) -> None:
    cut = find_cut(model_of(layers, limits, hop), len(limits), num_micro_batches)
    assert (cut.seconds if cut else None) == best_of_all_cuts(layers, limits, num_micro_batches, hop)
    if cut:
        assert sum(cut.counts) == len(layers)
        assert all(0 < count <= limit for count, limit in zip(cut.counts, limits, strict=True))


def test_the_best_cut_may_be_no_neighbour_of_a_better_one() -> None:
    """From (1, 2, 3) with 60 seconds no single layer's move is faster; only the search over all cuts finds 56."""
    cut = find_cut(model_of([(value, value) for value in (2.0, 2.0, 5.0, 5.0, 1.0, 1.0)]), 3, 3)
    assert cut is not None
    assert cut.counts == (3, 1, 2)
    assert cut.seconds == 56


def test_memory_refuses_a_cut() -> None:
    """A difference from Oobleck: its planners of 2023 and 2024 compute a stage's memory and refuse nothing by it."""
    layers = [(1.0, 2.0)] * 8
    free, tight = find_cut(model_of(layers), 4, 16), find_cut(model_of(layers, [1, 2, 2, 3]), 4, 16)
    assert free is not None
    assert tight is not None
    assert free.counts == (2, 2, 2, 2)
    assert tight.counts == (1, 2, 2, 3)
    assert tight.seconds > free.seconds


@pytest.mark.parametrize("limits", [[1, 2, 2, 2], [0, 4, 4, 4], [1] * 9])
def test_no_cut_without_memory_or_with_more_stages_than_layers(limits: list[int]) -> None:
    assert find_cut(model_of([(1.0, 2.0)] * 8, limits), len(limits), 16) is None


def test_a_slow_head_gets_fewer_layers() -> None:
    """The head's seconds are inside the last layer: its stage has fewer layers than the others."""
    cut = find_cut(model_of([(1.0, 2.0)] * 23 + [(3.0, 6.0)]), 6, 24)
    assert cut is not None
    assert cut.counts[-1] == min(cut.counts) < max(cut.counts)
