"""The simulated step against the schedule as a graph, against known vectors, and against closed forms that err."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.plan.survive.schedule import StageTime, fewest_seconds, simulate_step, steady_seconds

SECONDS = st.integers(1, 40).map(lambda tenths: tenths / 8)
STAGES = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6)
HOPS = st.sampled_from([0.0, 0.125, 1.0])


def times(stages: list[tuple[float, float]]) -> list[StageTime]:
    return [StageTime(*stage) for stage in stages]


def halves(*seconds: float) -> list[StageTime]:
    return [StageTime(value / 2, value / 2) for value in seconds]


def closed_form(seconds: list[float], num_micro_batches: int) -> float:
    """Oobleck, section 4.1.2: T1 + T2 + T3 with the slowest stage k*, the rightmost of equals."""
    slowest = max(range(len(seconds)), key=lambda stage: (seconds[stage], stage))
    middle = (num_micro_batches - len(seconds) + slowest - 1) * seconds[slowest]
    return sum(seconds) + middle + sum(seconds[slowest:])


@given(STAGES, st.integers(1, 14), HOPS)
def test_a_step_is_the_longest_path_through_its_passes(
    longest_path: Callable[..., float], stages: list[tuple[float, float]], num_micro_batches: int, hop: float
) -> None:
    assert simulate_step(times(stages), num_micro_batches, hop) == longest_path(stages, num_micro_batches, hop)


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8, 32])
def test_equal_stages_have_the_textbook_time(num_stages: int, num_micro_batches: int) -> None:
    assert simulate_step(halves(*[2.0] * num_stages), num_micro_batches) == 2 * (num_micro_batches + num_stages - 1)


@pytest.mark.parametrize(
    ("seconds", "num_micro_batches", "formula", "truth"),
    [([2, 1, 1, 1], 1, 2, 5), ([2, 1, 1, 1, 1, 1, 1, 1], 4, 8, 13)],
)
def test_closed_form_says_too_little_for_few_micro_batches(
    longest_path: Callable[..., float], seconds: list[float], num_micro_batches: int, formula: float, truth: float
) -> None:
    """A difference from Oobleck: its planner prices a pipeline by the closed form at the micro batches it is given.

    With fewer micro batches than stages that form prices less than one micro batch's way through the stages.
    """
    assert closed_form(seconds, num_micro_batches) == formula
    stages = [(value / 3, value * 2 / 3) for value in seconds]
    assert simulate_step(times(stages), num_micro_batches) == pytest.approx(truth)
    assert longest_path(stages, num_micro_batches) == pytest.approx(truth)


def test_closed_form_is_right_for_equal_stages() -> None:
    assert closed_form([2] * 5, 20) == simulate_step(halves(*[2] * 5), 20) == 48


@given(STAGES, st.integers(1, 14), HOPS)
def test_no_step_is_faster_than_its_bound(
    stages: list[tuple[float, float]], num_micro_batches: int, hop: float
) -> None:
    total = sum(map(sum, stages)) + 2 * hop * (len(stages) - 1)
    seconds = simulate_step(times(stages), num_micro_batches, hop)
    for at, stage in enumerate(times(stages)):
        before = sum(map(sum, stages[:at])) + 2 * hop * at
        assert fewest_seconds(stage, at, len(stages), before, total, num_micro_batches) <= seconds


@given(STAGES, HOPS)
def test_a_long_step_grows_by_its_steady_seconds(stages: list[tuple[float, float]], hop: float) -> None:
    # 60 is a multiple of the length of every cycle of up to six stages.
    grown = simulate_step(times(stages), 660, hop) - simulate_step(times(stages), 600, hop)
    assert grown == pytest.approx(60 * steady_seconds(times(stages), hop))


@given(STAGES, st.integers(1, 14), HOPS)
def test_more_micro_batches_never_take_less_time(
    stages: list[tuple[float, float]], num_micro_batches: int, hop: float
) -> None:
    assert simulate_step(times(stages), num_micro_batches, hop) < simulate_step(
        times(stages), num_micro_batches + 1, hop
    )


@pytest.mark.parametrize(("stages", "num_micro_batches"), [([], 1), (halves(1.0), 0)])
def test_a_step_without_stages_or_micro_batches_is_refused(stages: list[StageTime], num_micro_batches: int) -> None:
    with pytest.raises(ValueError, match="micro batch"):
        simulate_step(stages, num_micro_batches)
