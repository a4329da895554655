"""How often `interval: auto` checks: one slow check does not turn the guards off, and nothing does for long."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.train.guards.interval import FEWEST, MOST_SECONDS, MOST_STEPS, AutoInterval, interval_for

SECONDS = st.one_of(st.floats(0, 1e5), st.sampled_from([0.0, -1.0, 5e-324, math.inf, math.nan]))


def chosen(*timings: tuple[float, float]) -> list[int]:
    """Return the intervals that were announced."""
    auto = AutoInterval(0.0015)
    return [choice.interval for timing in timings if (choice := auto.add(*timing)) is not None]


def test_the_least_of_several_checks_decides() -> None:
    """A check of 5.5 s on a busy machine, as one in 107 starts had, would have made it every 3,788 steps."""
    assert chosen((0.05, 1.0), (0.05, 1.0), (5.5, 1.0), (5.5, 1.0)) == [34]
    assert chosen((5.5, 1.0), (0.05, 1.0), (0.05, 1.0)) == [34]
    assert chosen((5.5, 1.0), (0.05, 1.0)) == []


def test_no_interval_is_longer_than_the_caps() -> None:
    assert chosen(*[(5.5, 1.0)] * FEWEST) == [MOST_STEPS]
    assert chosen(*[(5.5, 20.0)] * FEWEST) == [MOST_SECONDS / 20]
    assert interval_for(50.0, 2 * MOST_SECONDS, 0.0015) == 1


def test_a_later_change_is_announced_and_a_small_one_is_not_made() -> None:
    cheap, dear = (0.03, 1.0), (0.12, 1.0)
    assert chosen(*[cheap] * 5, (0.03, 0.9)) == [20]
    assert chosen(*[dear] * FEWEST, cheap, *[dear] * 8) == [80, 20, 80]


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=20))
def test_any_timings_leave_an_interval_within_the_caps(timings: list[tuple[float, float]]) -> None:
    auto = AutoInterval(0.0015)
    for check_s, step_s in timings:
        choice = auto.add(check_s, step_s)
        assert 1 <= auto.interval <= MOST_STEPS
        if choice is not None:
            assert choice.interval == auto.interval
            assert math.isfinite(choice.share)
