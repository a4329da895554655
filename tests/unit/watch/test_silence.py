"""Which silences are usual: by what a program prints, and by heartbeats."""

from __future__ import annotations

from collections.abc import Callable

from bigsci_launch.watch.judge.durations import GENEROUS_S, GENEROUS_STEPS
from bigsci_launch.watch.judge.log_event import IN_BACKGROUND, LogEvent
from bigsci_launch.watch.judge.silence import Pace
from tests.support.texts import has_parts

from .conftest import STEP_S, Watched

Watch = Callable[..., Watched]
INTERVALS = {"eval_interval": 20, "save_interval": 10}


def pace(watched: Watched, seconds: float) -> Pace:
    return watched.silent(seconds).pace


def test_a_step_of_four_times_its_median_is_not_usual(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.steps(1, 8)
    assert [pace(watched, factor * STEP_S) for factor in (1.9, 2.0, 3.9, 4.0)] == [
        *(Pace.USUAL, Pace.LONG, Pace.LONG, Pace.TOO_LONG)
    ]
    found = watched.silent(4 * STEP_S)
    assert (found.phase, found.step, found.usual_s) == ("step", 8, STEP_S)
    assert has_parts(found.sentence, "step 8 ", "6 min 40 s", "step 9 ", "1 min 40 s")


def test_a_known_evaluation_may_take_its_time_but_not_four_times(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.steps(1, 20)
    watched.see(LogEvent("evaluated", step=20), after=720.0)
    watched.steps(21, 39)
    assert watched.silent(4 * STEP_S).phase == "step"
    watched.steps(40, 40)
    assert (watched.silent(700.0).phase, watched.silent(700.0).usual_s) == ("eval", 720.0)
    assert [pace(watched, seconds) for seconds in (1430, 1450, 2870, 2890)] == [
        *(Pace.USUAL, Pace.LONG, Pace.LONG, Pace.TOO_LONG)
    ]
    watched.see(LogEvent("evaluated", step=40), after=720.0)
    assert pace(watched, 450.0) is Pace.TOO_LONG, "the evaluation is over"


def test_the_first_evaluation_is_unknown_until_a_generous_bound(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.steps(1, 20)
    bound = max(GENEROUS_S, GENEROUS_STEPS * STEP_S)
    assert [pace(watched, seconds) for seconds in (1.9 * STEP_S, 2.1 * STEP_S, bound - 1, bound)] == [
        *(Pace.USUAL, Pace.UNKNOWN, Pace.UNKNOWN, Pace.TOO_LONG)
    ]
    assert has_parts(watched.silent(500.0).sentence, "evaluation", "not known")


def test_without_known_intervals_any_step_may_be_followed_by_an_evaluation(watch: Watch) -> None:
    unknown, said = watch(), watch()
    said.see(LogEvent("settings", text="eval_interval=0"), LogEvent("settings", text="save_interval=20"))
    for watched in (unknown, said):
        watched.steps(1, 15)
    assert [pace(watched, 4.5 * STEP_S) for watched in (unknown, said)] == [Pace.UNKNOWN, Pace.TOO_LONG]


def test_intervals_are_learned_from_two_occurrences(watch: Watch) -> None:
    watched = watch(save_interval=0)
    watched.steps(1, 20)
    watched.see(LogEvent("evaluated", step=20), after=300.0)
    watched.steps(21, 30)
    assert pace(watched, 4.5 * STEP_S) is Pace.UNKNOWN, "one occurrence tells no interval"
    watched.steps(31, 40)
    watched.see(LogEvent("evaluated", step=40), after=300.0)
    watched.steps(41, 55)
    assert pace(watched, 4.5 * STEP_S) is Pace.TOO_LONG
    watched.steps(56, 60)
    assert pace(watched, 550.0) is Pace.USUAL


def test_an_evaluation_of_many_sets_that_stops_at_the_first_is_noticed_soon(watch: Watch) -> None:
    """As on 2022-04-30: one of 29 sets was evaluated."""
    watched = watch(**INTERVALS)
    watched.steps(1, 20)
    for _ in range(29):
        watched.see(LogEvent("evaluated", step=20), after=25.0)
    watched.steps(21, 40)
    watched.see(LogEvent("evaluated", step=40), after=25.0)
    assert [pace(watched, seconds) for seconds in (190, 210, 410)] == [Pace.USUAL, Pace.LONG, Pace.TOO_LONG]


def test_a_save_is_known_from_its_two_lines(watch: Watch) -> None:
    watched = watch(eval_interval=0, save_interval=10)
    watched.steps(1, 10)
    watched.see(LogEvent("saving", step=10), after=0.1)
    watched.see(LogEvent("saved", step=10), after=400.0)
    watched.steps(11, 20)
    watched.see(LogEvent("saving", step=20), after=0.1)
    assert (watched.silent(790.0).phase, pace(watched, 790.0), pace(watched, 1610.0)) == (
        *("save", Pace.USUAL),
        Pace.TOO_LONG,
    )


def test_a_save_that_prints_nothing_is_learned(watch: Watch) -> None:
    watched = watch(eval_interval=0, save_interval=10)
    watched.steps(1, 10)
    watched.see(LogEvent("step", step=11, seconds=STEP_S), after=600.0)
    watched.steps(12, 20)
    assert (watched.silent(1100.0).phase, pace(watched, 1100.0)) == ("save", Pace.USUAL)
    watched.steps(21, 21)
    assert pace(watched, 4 * STEP_S) is Pace.TOO_LONG


def test_a_save_between_two_looks_took_no_longer_than_the_time_between_them(watch: Watch) -> None:
    watched = watch(eval_interval=0, save_interval=100)
    for first in range(1, 196, 15):
        steps = [LogEvent("step", step=step, seconds=2.0) for step in range(first, first + 15)]
        saved = [LogEvent("saving", step=100), LogEvent("saved", step=100)] if first <= 100 < first + 15 else []
        at = 100 - first + 1
        watched.see(*steps[:at], *saved, *steps[at:], after=30.0)
    watched.see(*(LogEvent("step", step=step, seconds=2.0) for step in (*range(196, 201),)), after=10.0)
    found = watched.silent(50.0)
    assert (found.phase, found.usual_s, found.pace) == ("save", 30.0, Pace.USUAL)
    assert pace(watched, 121.0) is Pace.TOO_LONG


def test_a_longer_time_that_was_survived_is_not_too_long_again(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.steps(1, 5)
    watched.steps(6, 6, seconds=900.0)
    watched.steps(7, 9)
    assert (pace(watched, 1300.0), pace(watched, 1351.0)) == (Pace.LONG, Pace.TOO_LONG)


def test_the_last_save_is_known_from_those_in_the_background(watch: Watch) -> None:
    """Their copies take no time, but the last save waits for its files."""
    watched = watch()
    for step in range(1, 20):
        watched.see(LogEvent("phase", time=watched.now, rank=0, step=step, phase="step"), after=10.0)
        watched.see(LogEvent("phase", time=watched.now, rank=0, step=step, phase="copy"), after=10.0)
        watched.see(LogEvent("saved", rank=0, step=step - 1, seconds=300.0, text=IN_BACKGROUND))
    assert watched.silent(300.0).phase == "copy"
    watched.see(LogEvent("phase", time=watched.now, rank=0, step=19, phase="save"), after=1.0)
    found = watched.silent(300.0)
    assert (found.phase, found.usual_s, found.pace) == ("save", 300.0, Pace.USUAL)


def test_a_larger_batch_takes_longer(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    for step in range(1, 9):
        watched.see(LogEvent("step", step=step, seconds=10.0, batch_size=16), after=10.0)
    watched.see(LogEvent("step", step=9, seconds=100.0, batch_size=160), after=100.0)
    assert (pace(watched, 190.0), pace(watched, 410.0)) == (Pace.USUAL, Pace.TOO_LONG)


def test_lines_that_wait_in_a_buffer_are_no_stall(watch: Watch) -> None:
    """Forty steps of two seconds arrive together, every 80 seconds; the watcher looks every 20."""
    watched = watch(**{"eval_interval": 0, "save_interval": 0})
    for first in range(1, 241, 40):
        for _ in range(3):
            watched.see(after=20.0)
            assert watched.tracker.silence(watched.now).pace in (Pace.USUAL, Pace.UNKNOWN)
        watched.see(*(LogEvent("step", step=step, seconds=2.0) for step in range(first, first + 40)), after=20.0)
    assert pace(watched, 81.0) is Pace.USUAL
    assert pace(watched, 400.0) is Pace.TOO_LONG


def test_what_happened_before_the_watcher_came_is_no_silence(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.see(*(LogEvent("step", time=1000.0 + 100 * step, step=step, seconds=100.0) for step in range(1, 10)))
    assert watched.tracker.silence(watched.now).lasts_s == 0
    assert pace(watched, 450.0) is Pace.UNKNOWN, "whether lines arrive as they are written is not known yet"
    watched.steps(10, 12)
    assert pace(watched, 450.0) is Pace.TOO_LONG


def test_output_is_no_progress_once_steps_are_known(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.see(LogEvent("output"))
    watched.see(LogEvent("output"), after=1700.0)
    assert watched.tracker.silence(watched.now).lasts_s == 0, "a program of unknown lines"
    watched.steps(1, 8)
    last = watched.now
    watched.see(LogEvent("output"), after=450.0)
    found = watched.tracker.silence(watched.now)
    assert (found.lasts_s, found.pace) == (watched.now - last, Pace.TOO_LONG)


def test_an_error_that_was_printed_is_worth_a_look(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.steps(1, 8)
    texts = ("Traceback (most recent call last):", "RuntimeError: CUDA error: unknown error", "srun: error: and so on")
    watched.see(*(LogEvent("failed", text=text) for text in texts))
    assert (pace(watched, 50.0), pace(watched, 61.0)) == (Pace.USUAL, Pace.LONG)
    assert "RuntimeError: CUDA error" in watched.silent(61.0).sentence
    watched.steps(9, 9)
    assert pace(watched, 61.0) is Pace.USUAL, "it went on"


def test_a_start_is_learned_from_a_start_that_was_seen(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.tracker.new_attempt(watched.now)
    assert [pace(watched, seconds) for seconds in (299, 301, 1801)] == [Pace.USUAL, Pace.UNKNOWN, Pace.TOO_LONG]
    watched.see(LogEvent("step", step=1, seconds=STEP_S), after=300.0)
    watched.steps(2, 9)
    watched.tracker.new_attempt(watched.now)
    assert (watched.silent(500.0).phase, pace(watched, 500.0), pace(watched, 1201.0)) == (
        *("start", Pace.USUAL),
        Pace.TOO_LONG,
    )


def test_a_log_that_goes_back_has_restarted(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.steps(1, 9)
    watched.see(LogEvent("step", step=5, seconds=300.0), after=900.0)
    assert watched.tracker.step == 5
    assert pace(watched, 4 * STEP_S) is Pace.UNKNOWN, "the first steps after a start take longer"
    watched.steps(6, 9)
    assert pace(watched, 4 * STEP_S) is Pace.TOO_LONG


def test_ranks_that_report_the_same_steps_later_are_no_restart(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    for step in range(1, 9):
        watched.see(*(LogEvent("step", rank=rank, step=step, seconds=STEP_S) for rank in (0, 1)), after=STEP_S)
    watched.see(LogEvent("step", rank=1, step=6), after=50.0)
    assert watched.tracker.step == 8
    assert pace(watched, 4 * STEP_S - 50) is Pace.TOO_LONG, "an old step is no progress"


def test_arguments_that_are_printed_again_are_another_start(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.steps(1, 8)
    watched.see(LogEvent("settings", text="eval_interval=20"), after=10.0)
    assert (watched.silent(450.0).phase, pace(watched, 450.0)) == ("start", Pace.UNKNOWN)


def test_a_program_that_says_that_it_ends_is_in_no_step(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.steps(1, 8)
    watched.see(LogEvent("end", text="[exiting program after 1190.03 minutes]"))
    assert (watched.silent(450.0).phase, pace(watched, 450.0), pace(watched, 901.0)) == (
        *("end", Pace.UNKNOWN),
        Pace.TOO_LONG,
    )


def test_a_silence_means_nothing_while_the_log_cannot_be_read(watch: Watch) -> None:
    watched = watch(**INTERVALS)
    watched.steps(1, 8)
    watched.tracker.take([], watched.now + 450.0, blind=["main_log.txt: Stale file handle"])
    found = watched.silent(450.0)
    assert (found.pace, "main_log.txt: Stale file handle" in found.sentence) == (Pace.UNKNOWN, True)
    watched.tracker.take([], watched.now + 460.0)
    assert pace(watched, 460.0) is Pace.TOO_LONG


def heartbeat(rank: int, phase: str, step: int, time: float) -> LogEvent:
    return LogEvent("phase", time, rank, step, phase)


def train(watched: Watched, num_ranks: int = 4, steps: int = 6, seconds: float = STEP_S) -> None:
    """Ranks that start, train, save for 40 s after each third step, and have heartbeats."""
    clock = 7.0  # another clock than the watcher's
    watched.see(*(LogEvent("start", clock, rank, 0) for rank in range(num_ranks)))
    watched.see(*(heartbeat(rank, "load", 0, clock + 5) for rank in range(num_ranks)), after=5.0)
    clock += 65.0
    for step in range(1, steps + 1):
        watched.see(*(heartbeat(rank, "step", step, clock) for rank in range(num_ranks)), after=seconds)
        clock += seconds
        if step % 3 == 0:
            watched.see(*(heartbeat(rank, "save", step, clock) for rank in range(num_ranks)), after=40.0)
            clock += 40.0


def test_heartbeats_tell_the_phase(watch: Watch) -> None:
    watched = watch(eval_interval=0)
    train(watched, steps=8)
    assert (watched.silent(50.0).phase, watched.silent(50.0).step) == ("step", 7)
    assert [pace(watched, factor * STEP_S) for factor in (1.9, 2.1, 4.0)] == [Pace.USUAL, Pace.LONG, Pace.TOO_LONG]
    watched.see(*(heartbeat(rank, "save", 9, 2000.0) for rank in range(4)), after=STEP_S)
    assert (watched.silent(79.0).usual_s, pace(watched, 79.0), pace(watched, 161.0)) == (
        *(40.0, Pace.USUAL),
        Pace.TOO_LONG,
    )


def test_the_ranks_that_are_behind_are_named(watch: Watch) -> None:
    watched = watch(eval_interval=0)
    train(watched, steps=8)
    watched.see(*(heartbeat(rank, "step", 9, 2000.0) for rank in (0, 2, 3)), after=STEP_S)
    found = watched.silent(4 * STEP_S)
    assert found.step == 7
    assert has_parts(found.sentence.rpartition(";")[2], "rank 1 ", "step 8", "ranks 0,2-3 ", "step 9")


def test_the_first_evaluation_with_heartbeats_is_unknown(watch: Watch) -> None:
    watched = watch(eval_interval=10)
    train(watched, steps=8)
    watched.see(*(heartbeat(rank, "eval", 8, 2000.0) for rank in range(4)), after=STEP_S)
    assert (watched.silent(100.0).phase, pace(watched, 1000.0), pace(watched, 2001.0)) == (
        *("eval", Pace.UNKNOWN),
        Pace.TOO_LONG,
    )


def test_history_is_learned_file_by_file(watch: Watch) -> None:
    """At the first look, all records of one rank come before those of the next, which says how large batches are."""
    watched = watch(eval_interval=0)
    heartbeats = [[heartbeat(rank, "step", step, 100.0 * step) for step in range(1, 10)] for rank in (0, 1)]
    told = [LogEvent("step", 950.0, 1, step, seconds=90.0, batch_size=8) for step in range(1, 9)]
    watched.see(*heartbeats[0], *heartbeats[1], *told)
    assert (watched.silent(1.0).usual_s, pace(watched, 401.0)) == (100.0, Pace.TOO_LONG)


def test_an_evaluation_without_a_heartbeat_may_be_in_a_step(watch: Watch) -> None:
    """As in programs that use the library of guards: they have heartbeats for steps and saves."""
    watched = watch()
    train(watched, steps=8)
    assert (watched.silent(450.0).phase, pace(watched, 450.0)) == ("step", Pace.UNKNOWN)


def test_a_silent_log_is_no_silence_while_ranks_move(watch: Watch) -> None:
    watched = watch(eval_interval=0, save_interval=0)
    watched.steps(1, 8)
    train(watched, steps=20)
    assert watched.tracker.silence(watched.now).pace is Pace.USUAL
    assert watched.tracker.silence(watched.now).lasts_s == 0


def test_a_job_that_outlives_its_ranks_is_no_step(watch: Watch) -> None:
    watched = watch(eval_interval=0)
    train(watched, steps=8)
    watched.see(*(LogEvent("end", 2000.0, rank, 8) for rank in range(4)))
    assert [(watched.silent(seconds).phase, pace(watched, seconds)) for seconds in (500, 901)] == [
        *(("end", Pace.UNKNOWN), ("end", Pace.TOO_LONG))
    ]


def test_the_next_attempt_keeps_what_was_learned(watch: Watch) -> None:
    watched = watch(eval_interval=0)
    train(watched, steps=8)
    watched.see(*(LogEvent("end", 2000.0, rank, 8) for rank in range(4)))
    watched.see(*(LogEvent("start", 9000.0, rank, 0) for rank in range(4)), after=1000.0)
    assert (watched.silent(100.0).phase, watched.silent(100.0).usual_s) == ("start", 65.0)
    for step in (7, 8, 9, 10):
        watched.see(*(heartbeat(rank, "step", step, 9000.0 + 100 * step) for rank in range(4)), after=STEP_S)
    assert pace(watched, 4 * STEP_S) is Pace.TOO_LONG
