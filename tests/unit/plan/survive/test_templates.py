"""Which sizes suffice, against brute force; the seconds of a template against the simulation."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.plan.survive.cut import CutModel
from bigsci_launch.plan.survive.schedule import StageTime, simulate_step
from bigsci_launch.plan.survive.templates import (
    Template,
    smallest_number_of_sizes,
    sufficient_sizes,
    usable_sizes,
)

SECONDS = st.integers(8, 16).map(lambda eighths: eighths / 8)


def totals(sizes: tuple[int, ...], failures: int, num_nodes: int) -> set[int]:
    """Return every number of nodes that f + 1 or more pipelines of these sizes have, by adding pipeline to pipeline."""
    reached, here = set(), {0}
    for count in range(1, num_nodes // min(sizes) + 1):
        here = {total + size for total in here for size in sizes if total + size <= num_nodes}
        if count > failures:
            reached |= here
    return reached


def suffices(sizes: tuple[int, ...], failures: int, num_nodes: int) -> bool:
    return set(range((failures + 1) * min(sizes), num_nodes + 1)) <= totals(sizes, failures, num_nodes)


@pytest.mark.parametrize("fewest_nodes", range(1, 10))
@pytest.mark.parametrize("failures", range(6))
def test_the_formula_for_the_number_of_sizes_is_exact(fewest_nodes: int, failures: int) -> None:
    count = smallest_number_of_sizes(fewest_nodes, failures)
    sizes = tuple(range(fewest_nodes, fewest_nodes + count))
    assert suffices(sizes, failures, 80)
    assert count == 1 or not suffices(sizes[:-1], failures, 80)


@pytest.mark.parametrize("fewest_nodes", range(1, 7))
@pytest.mark.parametrize("failures", range(5))
def test_sufficient_sizes_are_the_fewest_consecutive_ones(fewest_nodes: int, failures: int) -> None:
    for num_nodes in range((failures + 1) * fewest_nodes, 41):
        sizes = sufficient_sizes(fewest_nodes, failures, num_nodes)
        assert suffices(sizes, failures, num_nodes)
        assert len(sizes) == 1 or not suffices(sizes[:-1], failures, num_nodes)
        assert set(sizes) <= set(usable_sizes(fewest_nodes, failures, num_nodes))


def test_usable_sizes_are_those_of_some_composition() -> None:
    for failures in range(4):
        for num_nodes in range(3 * (failures + 1), 25):
            usable = usable_sizes(3, failures, num_nodes)
            # The others have 3 nodes or more, whatever they have.
            used = {
                size
                for size in range(3, num_nodes + 1)
                for count in range(failures, num_nodes)
                if (rest := num_nodes - size) >= 3 * count and (count > 0 or rest == 0) and count >= failures
            }
            assert set(usable) >= used if failures == 0 else set(usable) == used


def test_no_template_is_made_that_nothing_could_use() -> None:
    """A difference from Oobleck: for n0 = 3, f = 1, 13 nodes the artifact makes sizes 3 to 12 (N - f), ours end at 10.

    With 11 nodes in one pipeline the other would have 2, fewer than n0. Two sizes are enough for every number of nodes.
    """
    assert len(tuple(range(3, 13 - 1 + 1))) == 10
    assert tuple(usable_sizes(3, 1, 13)) == tuple(range(3, 11))
    assert smallest_number_of_sizes(3, 1) == 2
    assert sufficient_sizes(3, 1, 13) == (3, 4)
    assert totals((3, 4), 1, 13) == set(range(6, 14))


def test_three_sizes_suffice_where_the_frobenius_argument_asks_for_eight() -> None:
    """A difference from Oobleck: it wants n0 sizes or more, since then one pipeline already covers every number."""
    assert smallest_number_of_sizes(8, 3) == 3
    assert suffices((8, 9, 10), 3, 200)


def test_few_nodes_need_fewer_sizes_than_the_formula() -> None:
    assert smallest_number_of_sizes(8, 1) == 5
    assert sufficient_sizes(8, 1, 18) == (8, 9)
    assert sufficient_sizes(8, 1, 16) == (8,)


def test_sizes_with_gaps_can_be_fewer() -> None:
    """Five consecutive sizes are the fewest consecutive ones for n0 = 8 and f = 1, but four with a gap also suffice."""
    fewer = [sizes for sizes in combinations(range(8, 17), 4) if sizes[0] == 8 and suffices(sizes, 1, 60)]
    assert (8, 9, 11, 12) in fewer
    assert not any(suffices(sizes, 1, 60) for sizes in combinations(range(8, 17), 3) if sizes[0] == 8)


def test_too_few_nodes_have_no_sizes() -> None:
    assert sufficient_sizes(3, 2, 8) == ()


def template_of(stages: list[tuple[float, float]], hop: float) -> Template:
    model = CutModel(tuple(StageTime(*stage) for stage in stages), lambda stage, stages: 1, hop)
    return Template(len(stages), (1,) * len(stages), model)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6), st.sampled_from([0.0, 0.0625, 0.25]))
def test_seconds_of_many_micro_batches_are_those_of_the_simulation(
    stages: list[tuple[float, float]], hop: float
) -> None:
    template = template_of(stages, hop)
    for num_micro_batches in (1, 2, 6 * len(stages)):
        assert template.seconds(num_micro_batches) == simulate_step(template.model.layers, num_micro_batches, hop)
    for num_micro_batches in (6 * len(stages) + 1, 100):
        simulated = simulate_step(template.model.layers, num_micro_batches, hop)
        assert template.seconds(num_micro_batches) == pytest.approx(simulated, rel=0.01)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6), st.sampled_from([0.0, 0.0625, 0.25]))
def test_seconds_never_fall_and_are_never_below_the_rate(stages: list[tuple[float, float]], hop: float) -> None:
    """The split of a batch is exact because of both."""
    template = template_of(stages, hop)
    seconds = [template.seconds(count) for count in range(1, 10 * len(stages))]
    assert seconds == sorted(seconds)
    for count, value in enumerate(seconds, start=1):
        assert value >= count * template.seconds_per_micro_batch * (1 - 1e-12)


@pytest.mark.parametrize("seconds", [0.0, 2.9, 3.0, 11.9, 12.0, 300.0])
def test_most_micro_batches_is_the_inverse_of_seconds(seconds: float) -> None:
    assert template_of([(1.0, 2.0)], 0.0).most_micro_batches(seconds) == int(seconds / 3)
