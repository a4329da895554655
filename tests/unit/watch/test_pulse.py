"""After which silence the ranks of a run are worth a look."""

from __future__ import annotations

import math
from collections.abc import Callable

from bigsci_launch.watch.judge.log_event import LogEvent
from bigsci_launch.watch.judge.pulse import CALLS_LOOK_S, LEAST_LOOK_S, OUTPUT_LOOK_S, UNKNOWN_LOOK_S

from .conftest import STEP_S, Watched

Watch = Callable[..., Watched]
OUTPUT, CALL = LogEvent("output"), LogEvent("call")


def look_in(watched: Watched, seconds: float = 0.0) -> float:
    return watched.silent(seconds).look_in_s


def test_a_run_without_a_rhythm_is_looked_at_after_half_a_minute(watch: Watch) -> None:
    watched = watch()
    watched.see(OUTPUT)
    assert [look_in(watched, seconds) for seconds in (0.0, 20.0, 31.0)] == [UNKNOWN_LOOK_S, 10.0, -1.0]
    for _ in range(3):
        watched.see(OUTPUT, after=100.0)
    assert look_in(watched) == UNKNOWN_LOOK_S, "a slow rhythm of lines that are not understood is none"


def test_lines_that_are_not_understood_have_a_rhythm_too(watch: Watch) -> None:
    watched = watch()
    for gap in (1.0, 20.0, 1.0):
        watched.see(OUTPUT, after=gap)
    assert look_in(watched) == OUTPUT_LOOK_S, "one long gap is the start"
    watched.see(OUTPUT, after=6.0)
    assert look_in(watched) == 12.0
    for _ in range(100):
        watched.see(OUTPUT, after=1.0)
    assert look_in(watched) == OUTPUT_LOOK_S


def test_a_known_step_is_looked_at_after_twice_its_length_and_a_phase_that_is_due_counts(watch: Watch) -> None:
    quick, slow = watch(eval_interval=0, save_interval=10, save_time_s=40.0), watch()
    quick.steps(1, 8, 1.0)
    slow.steps(1, 8)
    assert (look_in(quick), look_in(slow)) == (LEAST_LOOK_S, 2 * STEP_S)
    quick.steps(9, 10, 1.0)
    assert look_in(quick) == 80.0, "a save is due"


def test_calls_bring_a_look_forward_and_never_put_it_off(watch: Watch) -> None:
    watched = watch()
    watched.steps(1, 8)
    assert watched.silent(0.0).quiet_s is None
    for _ in range(8):
        watched.see(CALL, after=2.0)
    assert look_in(watched, 4.0) == 1.0, "steps of 100 s, but calls every other second"
    assert (watched.silent(0.0).lasts_s, watched.silent(0.0).quiet_s) == (16.0, 0.0)
    for _ in range(8):
        watched.see(CALL, after=30.0)
    assert look_in(watched, 1.0) < 0, "calls continue, but the step is late"


def test_the_first_calls_bring_a_look_forward_before_their_rhythm_is_known(watch: Watch) -> None:
    watched = watch()
    watched.see(OUTPUT)
    watched.see(CALL, after=1.0)
    assert look_in(watched) == CALLS_LOOK_S < UNKNOWN_LOOK_S
    assert [watched.silent(seconds).calls_in_s for seconds in (0.0, 4.0)] == [CALLS_LOOK_S, CALLS_LOOK_S - 4.0]
    assert watch().silent(0.0).calls_in_s == math.inf


def test_an_error_is_followed_soon(watch: Watch) -> None:
    watched = watch()
    watched.steps(1, 8)
    watched.see(LogEvent("failed", text="Traceback (most recent call last)"))
    assert look_in(watched) == OUTPUT_LOOK_S


def test_only_what_comes_after_the_first_look_shows_that_a_run_is_alive(watch: Watch) -> None:
    watched = watch()
    watched.see(LogEvent("step", step=7))
    assert not watched.silent(0.0).has_shown
    watched.see(CALL, after=1.0)
    assert not watched.silent(0.0).has_shown
    watched.see(LogEvent("step", step=8), after=1.0)
    assert watched.silent(0.0).has_shown
    watched.tracker.new_attempt(watched.now)
    assert not watched.silent(0.0).has_shown
