"""Healthy runs with everything that might look like a fault, and many hours of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.watch.judge.state import Expected
from watching.lines import bloom, megatron_lm, pulses
from watching.noise import Values, draw_steps
from watching.runs import Plan, Ranks, end_of, heartbeat_run, log_run
from watching.simulation import LOG, Event, Tale

HOUR = 3600.0
BAR = "\rTrain: 45%|####5     | 450/1000 [12:00<14:40,  1.60s/it, loss=2.10]"


@dataclass(frozen=True, slots=True)
class Normal:
    """A healthy run in which nothing must be said to be wrong."""

    what: str
    make: Callable[[], Tale]


def _tale(events: list[Event], **fields: object) -> Tale:
    return replace(Tale("", events, end_of(sorted(events, key=lambda event: event.time))), **fields)  # type: ignore[arg-type]


def evaluations() -> Tale:
    """Two evaluations of 12 minutes each, with all of their saves, and hourly PULSE lines."""
    events = log_run(Plan(44950, 46050), draw_steps(21, 105.2, 2.15, 0.15))
    return _tale(events + list(pulses(0, end_of(events))))


def one_set_evaluations() -> Tale:
    """An evaluation that prints nothing for 12 minutes."""
    return _tale(log_run(Plan(950, 1250, eval_interval=100, num_sets=1), draw_steps(22, 105.2, 2.15, 0.15)))


def silent_saves() -> Tale:
    """Saves of four minutes that print nothing."""
    plan = Plan(1, 200, eval_interval=0, save_interval=50, save_s=240.0, says_saves=False)
    return _tale(log_run(plan, draw_steps(23, 30.0, 2.15, 0.15)))


def ramp_up() -> Tale:
    """The batch grows from 192 to 784 samples, and a step from 15 to 46 seconds."""
    events, now, step = log_run(Plan(1, 1, save_interval=0), draw_steps(24, 15.0, 6.0, 0.7)), 620.0, 1
    for size in range(192, 800, 16):
        for values in _take(draw_steps(size, size * 46 / 784, 5.0, 0.6), 40):
            step, now = step + 1, now + values.seconds
            events.append(Event(now, bloom(step, values, size)))
    return _tale(events)


def _take(steps: object, number: int) -> list[Values]:
    return [next(steps) for _ in range(number)]  # type: ignore[call-overload]


def restarts() -> Tale:
    """Three jobs write to one log; each begins at the last save, after a start of ten minutes."""
    events, begun, starts = [], 0.0, []
    for first, last in ((1, 155), (101, 260), (201, 330)):
        starts.append(begun)
        part = log_run(Plan(first, last), draw_steps(first, 105.2, 2.15, 0.15), begun)
        events += [
            *part,
            Event(end_of(part), "[exiting program after 1190.03 minutes] datetime: 2022-04-30 20:20:20\n"),
        ]
        begun = end_of(part) + 800.0
    return _tale(events, new_attempts=tuple(starts))


def restarts_unannounced() -> Tale:
    """The same, in a log of a program whose jobs nobody announces to the watcher."""
    return replace(restarts(), new_attempts=())


def rotation() -> Tale:
    """The log is rotated every hour, and truncated once."""
    events = log_run(Plan(1, 300, eval_interval=100), draw_steps(25, 60.0, 2.15, 0.15))
    moves = [Event(hour * HOUR, act=_rotate) for hour in range(1, int(end_of(events) // HOUR))]
    return _tale([*events, *moves, Event(2.5 * HOUR, act=lambda folder: (folder / LOG).write_text(""))])


def _rotate(folder: Path) -> None:
    (folder / LOG).rename(folder / f"{LOG}.1")
    (folder / LOG).touch()


def bars() -> Tale:
    """Every line is torn in two, and progress bars without a line break fill the log between them."""
    events = log_run(Plan(1, 120, eval_interval=0, save_interval=20), draw_steps(26, 60.0, 2.15, 0.15))
    torn = [Event(event.time + part * 15, text) for event in events for part, text in enumerate(_halves(event.text))]
    flood = [Event(2000.0 + 600 * number, BAR * 150_000) for number in range(6)]
    return _tale([*torn, *flood])


def _halves(text: str) -> tuple[str, str]:
    middle = len(text) // 2
    return text[:middle], text[middle:]


def buffered() -> Tale:
    """Steps of two seconds whose lines arrive forty at a time."""
    plan = Plan(1, 3000, eval_interval=0, save_interval=0, start_s=120.0)
    events = log_run(plan, draw_steps(27, 2.0, 2.15, 0.15))
    return _tale([replace(event, time=80.0 * (1 + event.time // 80.0)) for event in events])


def every_tenth() -> Tale:
    """Only every tenth step has a line, with a time, and clocks are wrong by minutes; evaluations in between."""
    plan = Plan(1, 2000, eval_interval=250, eval_s=90.0, save_interval=500, save_s=60.0, num_sets=1)
    events = log_run(
        plan, draw_steps(28, 6.0, 2.15, 0.15), style=lambda step, values, now: megatron_lm(step, values, now - 500)
    )
    return _tale([event for event in events if "iteration " not in event.text or _is_tenth(event.text)])


def _is_tenth(text: str) -> bool:
    return "] iteration" not in text or int(text.split("iteration")[1].split("/")[0]) % 10 == 0


def comes_late() -> Tale:
    """The watcher comes in the middle, and sees the history at once."""
    tale = evaluations()
    return replace(tale, comes=tale.until - 2 * HOUR)


def heartbeats() -> Tale:
    """48 ranks of `bsl train` with evaluations and saves; their clock is ten minutes behind the watcher's."""
    plan = Plan(1, 120, eval_interval=40, eval_s=700.0, save_interval=20, start_s=300.0)
    events = heartbeat_run(plan, draw_steps(29, 60.0, 2.15, 0.15), Ranks(48))
    return _tale(events, attempt=True, expected=Expected(eval_interval=40, save_interval=20))


def silent_log() -> Tale:
    """Ranks with heartbeats whose log says nothing, as where the output waits in a buffer."""
    plan = Plan(1, 200, eval_interval=0, save_interval=0, start_s=60.0)
    events = heartbeat_run(plan, draw_steps(30, 20.0, 2.15, 0.15), Ranks(8))
    return _tale([event for event in events if '"kind": "step"' not in event.text], attempt=True)


def trainer() -> Tale:
    """Hugging Face's Trainer: a report every ten steps, its number only in a progress bar."""
    events, now, draw = [], 60.0, random.Random(31)
    for step in range(1, 1500):
        now += 4.0 * (1 + draw.gauss(0, 0.01))
        bar = f"\r {step // 15}%|###       | {step}/1500 [10:00<50:00,  4.00s/it]"
        report = (
            f"\n{{'loss': {2.1 + draw.gauss(0, 0.05):.4f}, 'grad_norm': 0.5, 'learning_rate': 1e-05, 'epoch': 0.1}}\n"
        )
        events.append(Event(now, bar + (report if step % 10 == 0 else "")))
    return _tale(events)


NORMAL = (
    Normal("evaluations of 29 sets in 12 minutes, saves of 40 s, hourly PULSE lines", evaluations),
    Normal("evaluations that print nothing for 12 minutes", one_set_evaluations),
    Normal("saves of 4 minutes that print nothing", silent_saves),
    Normal("ramp-up from 192 to 784 samples, 11 to 46 s", ramp_up),
    Normal("three jobs in one log, each from the last save", restarts),
    Normal("the same, and the starts are not announced to the watcher", restarts_unannounced),
    Normal("a log that is rotated every hour and truncated once", rotation),
    Normal("torn lines between floods of 10 MB of progress bars", bars),
    Normal("steps of 2 s whose lines arrive forty at a time", buffered),
    Normal("a line for every tenth step, with clocks that are wrong", every_tenth),
    Normal("a watcher that comes in the middle of a run", comes_late),
    Normal("48 ranks with heartbeats, evaluations and saves", heartbeats),
    Normal("ranks with heartbeats whose logs are silent", silent_log),
    Normal("Hugging Face's Trainer, a report every ten steps", trainer),
)


def hours(seed: int, kind: str, times: float, length: float = 10 * HOUR) -> Tale:
    """A healthy run of ten hours: `bloom`, `small` (steps of 2 s) or `heartbeats`; `times` the measured noise."""
    if kind == "bloom":
        steps = draw_steps(seed, 105.2, 2.15, 0.15, times=times)
        events = log_run(Plan(1, int(length / 110), eval_interval=100, save_interval=20), steps)
    elif kind == "small":
        plan = Plan(
            1, int(length / 2.05), eval_interval=1000, eval_s=60.0, save_interval=500, save_s=15.0, start_s=90.0
        )
        events = log_run(plan, draw_steps(seed, 2.0, 2.6, 0.4, times=times))
    else:
        plan = Plan(1, int(length / 11), eval_interval=200, eval_s=120.0, save_interval=100, save_s=20.0, start_s=90.0)
        events = heartbeat_run(plan, draw_steps(seed, 10.0, 2.6, 0.4, times=times), Ranks(8))
    known = Expected(eval_interval=200, save_interval=100) if kind == "heartbeats" else Expected()
    made = Tale(
        "", [event for event in events if event.time <= length], length, attempt=kind == "heartbeats", expected=known
    )
    end = max(event.time for event in made.events)
    return replace(made, until=min(length, end))
