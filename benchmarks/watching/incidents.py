"""The incidents of BLOOM's chronicles that files show, and some of our own, each as a run that goes wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bigsci_launch.watch.judge.state import Expected
from watching.lines import bloom, pulses
from watching.noise import LARGE_BATCH, Values, draw_steps, read_rows
from watching.runs import Plan, Ranks, heartbeat_run, log_run
from watching.simulation import Event, Tale

HOUR = 3600.0
BEFORE_S = 3 * HOUR
"""How long before the onset the watcher comes, unless the tale says otherwise."""


@dataclass(frozen=True, slots=True)
class Incident:
    """`number` is that of the chronicle's list, None for one of our own. `wanted` is what must be found: `stall`,
    or a kind of what is noticed. `source` says what the watcher reads."""

    number: str
    what: str
    source: str
    wanted: str
    make: Callable[[], Tale]


def _steps(seed: int = 7, seconds: float = 105.2, loss: float = 2.15) -> Iterator[Values]:
    return draw_steps(seed, seconds, loss, 0.15, loss_times=LARGE_BATCH, falls=0.0)


def _cut(events: list[Event], onset: float) -> list[Event]:
    """The events up to the moment at which nothing more happens."""
    return [event for event in events if event.time <= onset]


def _time_of(events: list[Event], text: str) -> float:
    return next(event.time for event in events if text in event.text)


def _hang(events: list[Event], onset: float, hours: float = 2.0, **fields: object) -> Tale:
    more = list(pulses(onset % HOUR, onset + hours * HOUR))
    made = Tale("", _cut(events, onset) + more, onset + hours * HOUR, onset, max(0.0, onset - BEFORE_S))
    return replace(made, **fields)  # type: ignore[arg-type]


CRASH = (
    "[default3]:Traceback (most recent call last):\n"
    '[default3]:  File "pretrain_gpt.py", line 245, in main\n'
    "[default3]:RuntimeError: CUDA error: unknown error\n"
)


def crash_without_end() -> Tale:
    """An error is printed, and nothing after it: the other ranks wait, the job stays RUNNING."""
    events = log_run(Plan(20000, 20150), _steps())
    onset = _time_of(events, "iteration    20148/") + 20.0
    return _hang([*_cut(events, onset), Event(onset, CRASH)], onset)


def loss_spike() -> Tale:
    """The published lines of steps 31214 to 31222, and of 31250 and 31251."""
    before = log_run(Plan(31100, 31213), _steps(seconds=106.2, loss=2.205))
    rows = [row for row in read_rows("bloom-176b") if 31214 <= row[0] <= 31222]
    calm = [row for row in read_rows("bloom-176b") if row[0] in (31250, 31251)]
    now, onset, events = before[-1].time, 0.0, list(before)
    published = [*rows, *((31223 + at, *row[1:]) for at, row in enumerate(itertools.islice(itertools.cycle(calm), 60)))]
    for step, seconds, loss, norm in published:
        now += seconds
        onset = now if step == 31215 else onset
        events.append(Event(now, bloom(step, Values(seconds, loss, norm))))
    return Tale("", events, now, onset)


def slow_node() -> Tale:
    """The published lines of steps 42780 to 42784, then 111.0 s with measured noise."""
    before = log_run(Plan(42701, 42779), _steps(seconds=105.16))
    rows = [row for row in read_rows("bloom-176b") if 42780 <= row[0] <= 42784]
    now, onset, events = before[-1].time, 0.0, list(before)
    for step, seconds, loss, norm in rows:
        onset = now if step == 42783 else onset
        now += seconds
        events.append(Event(now, bloom(step, Values(seconds, loss, norm))))
    for step, values in zip(range(42785, 42850), _steps(9, 111.0), strict=False):
        now += values.seconds
        events.append(Event(now, bloom(step, values)))
    return Tale("", events, now, onset)


def evaluation_hang(*, seen_before: bool) -> Tale:
    """One of 29 data sets is evaluated at step 45000, and nothing after it but PULSE lines."""
    first = 43950 if seen_before else 44950
    events = log_run(Plan(first, 45000), _steps())
    onset = _time_of(events, "loss at iteration 45000 ")
    return _hang(events, onset, 4.0, comes=0.0)


def evaluation_hang_found_late() -> Tale:
    """The watcher comes an hour after the hang began: it sees the history of the log, without times."""
    tale = evaluation_hang(seen_before=True)
    assert tale.onset is not None
    return replace(tale, comes=tale.onset + HOUR)


def evaluation_hang_at_once() -> Tale:
    """At step 51000: not even the first data set, in a log whose earlier evaluations the watcher has only read."""
    events = log_run(Plan(48950, 51000), _steps(11))
    onset = _time_of(events, "iteration    51000/")
    return _hang(events, onset, 4.0, comes=onset - HOUR)


def evaluation_hang_with_heartbeats() -> Tale:
    """384 ranks of `bsl train` hang in their second evaluation."""
    plan = Plan(1, 40, eval_interval=20, save_interval=20, start_s=300.0)
    events = heartbeat_run(plan, _steps(5), Ranks(384))
    onset = next(event.time for event in events if '"eval"' in event.text and '"step": 40' in event.text) + 1.0
    known = Expected(eval_interval=20, save_interval=20)
    return Tale("", _cut(events, onset), onset + 2 * HOUR, onset, attempt=True, expected=known)


def first_evaluation_hang_with_heartbeats() -> Tale:
    """The same in the first evaluation of the run, whose length nobody knows."""
    plan = Plan(1, 40, eval_interval=40, save_interval=0, start_s=300.0)
    events = heartbeat_run(plan, _steps(5), Ranks(16))
    onset = next(event.time for event in events if '"eval"' in event.text) + 1.0
    known = Expected(eval_interval=40, save_interval=0)
    return Tale("", _cut(events, onset), onset + 2 * HOUR, onset, attempt=True, expected=known)


def lost_nodes() -> Tale:
    """The processes of two nodes are killed during a step, and the job does not end: the other ranks wait for them."""
    plan = Plan(1, 30, eval_interval=0, save_interval=10, start_s=300.0)
    events = heartbeat_run(plan, _steps(5), Ranks(48))
    onset = next(event.time for event in events if '"step": 27,' in event.text) + 40.0
    known = Expected(eval_interval=0, save_interval=10)
    return Tale("", _cut(events, onset), onset + HOUR, onset, attempt=True, expected=known)


def rank_behind() -> Tale:
    """One rank does not finish its save, and the others wait for it in the next step."""
    plan = Plan(1, 30, eval_interval=0, save_interval=5, start_s=60.0)
    events = heartbeat_run(plan, _steps(5, 10.0), Ranks(48))
    onset = next(event.time for event in events if '"save"' in event.text and '"step": 25,' in event.text) + 1.0
    kept = [event for event in events if event.time <= onset or ("rank-0017" not in event.file)]
    end = next(event.time for event in kept if '"phase": "step"' in event.text and '"step": 26,' in event.text) + 1.0
    known = Expected(eval_interval=0, save_interval=5)
    return Tale("", _cut(kept, end), onset + HOUR, onset, attempt=True, expected=known)


def pulse_only() -> Tale:
    """Nothing but the lines of a watchdog that sees the job in squeue."""
    events = log_run(Plan(60001, 60080), _steps(3))
    onset = _time_of(events, "iteration    60070/")
    return _hang(events, onset, 3.0)


def blind() -> Tale:
    """The log cannot be read any longer: the watcher must say so."""
    events = log_run(Plan(60001, 60080), _steps(3))
    onset = _time_of(events, "iteration    60040/") + 1.0
    gone = Event(onset, act=lambda folder: (folder / "main_log.txt").rename(folder / "elsewhere"))
    written = [replace(event, file="elsewhere") if event.time > onset else event for event in events]
    return Tale("", [*written, gone], onset + HOUR, onset)


def no_number() -> Tale:
    """The loss becomes NaN, as in bigscience-workshop/Megatron-DeepSpeed#396."""
    events = log_run(Plan(5300, 5424), _steps(2, 4.25))
    now = onset = events[-1].time
    for step in range(5425, 5460):
        now += 4.25
        events.append(Event(now, bloom(step, Values(4.25, float("nan"), float("nan")), 8)))
    return Tale("", events, now, onset)


def foreign_step_hang() -> Tale:
    """A program of unknown intervals hangs in a step of two seconds."""
    plan = Plan(1, 900, eval_interval=0, save_interval=0, start_s=60.0)
    events = [event for event in log_run(plan, _steps(4, 2.0)) if "_interval" not in event.text]
    onset = _time_of(events, "iteration      700/")
    return Tale("", _cut(events, onset), onset + HOUR, onset)


def foreign_step_hang_known() -> Tale:
    """The same, of a program that has printed its arguments."""
    tale = foreign_step_hang()
    said = Event(1.0, "  eval_interval ........ 0\n  save_interval ........ 1000\n")
    return replace(tale, events=[said, *tale.events])


INCIDENTS = (
    Incident(
        "3, 12", "a rank prints a CUDA error; the others wait, the job stays RUNNING", "log", "stall", crash_without_end
    ),
    Incident("10", "the loss spike of steps 31215 to 31250, as published", "log", "loss_spike", loss_spike),
    Incident("14", "105.2 s become 111.0 s at step 42783, as published", "log", "slower", slow_node),
    Incident(
        *("15", "hang after the first of 29 data sets at 45000; earlier evaluations were seen", "log", "stall"),
        lambda: evaluation_hang(seen_before=True),
    ),
    Incident(
        *("15", "the same, and it is the first evaluation that the watcher sees", "log", "stall"),
        lambda: evaluation_hang(seen_before=False),
    ),
    Incident(
        *("15", "the same, and the watcher comes an hour later", "log", "stall"),
        evaluation_hang_found_late,
    ),
    Incident(
        *("19", "hang before the first data set at 51000; earlier evaluations only in the history", "log", "stall"),
        evaluation_hang_at_once,
    ),
    Incident(
        *("20", "384 ranks hang in their second evaluation", "heartbeats", "stall"), evaluation_hang_with_heartbeats
    ),
    Incident(
        *("20", "16 ranks hang in the first evaluation of the run", "heartbeats", "stall"),
        first_evaluation_hang_with_heartbeats,
    ),
    Incident("21", "two nodes die during a step, and the job does not end", "heartbeats", "stall", lost_nodes),
    Incident("27", "PULSE says that the job runs; no step for hours", "log", "stall", pulse_only),
    Incident("27", "the log can no longer be read", "log", "blind", blind),
    Incident(
        "own",
        "one of 48 ranks does not finish its save; the others wait in the next step",
        "heartbeats",
        "stall",
        rank_behind,
    ),
    Incident("own", "the loss becomes NaN", "log", "nan", no_number),
    Incident("own", "a step of 2 s hangs; the program printed its intervals", "log", "stall", foreign_step_hang_known),
    Incident("own", "the same, of a program whose intervals are not known", "log", "stall", foreign_step_hang),
)
