"""A run that is written to files line by line, and a watcher that reads them, with one simulated clock.

The files are real: they grow, are rotated and torn, and are read by the readers of `bsl watch`. Only time is simulated.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.watch.judge.progress import ProgressTracker
from bigsci_launch.watch.judge.silence import Noticed, Pace, Silence
from bigsci_launch.watch.judge.state import Expected
from bigsci_launch.watch.read.sources import AttemptTail, LogTail

POLL_S = 30.0
LOG = "main_log.txt"


@dataclass(frozen=True, slots=True)
class Event:
    """At `time`, `text` is appended to a file of the folder, or `act` is done to the folder."""

    time: float
    text: str = ""
    file: str = LOG
    act: Callable[[Path], object] | None = None


@dataclass(frozen=True, slots=True)
class Tale:
    """What happens in a run. `onset` is when something goes wrong, None in a healthy run; then `until` is its end.

    The watcher comes at `comes`. `attempt`: the files are those of an attempt, otherwise one log. `new_attempts` are
    times at which the run is known to start again.
    """

    name: str
    events: Iterable[Event]
    until: float
    onset: float | None = None
    comes: float = 0.0
    expected: Expected = field(default_factory=Expected)
    attempt: bool = False
    new_attempts: tuple[float, ...] = ()
    poll_s: float = POLL_S


@dataclass(slots=True)
class Seen:
    """What the watcher said. Times are those of the simulated clock."""

    tale: Tale
    looks: list[tuple[float, Silence]] = field(default_factory=list)
    stalls: list[tuple[float, Silence]] = field(default_factory=list)
    noticed: list[tuple[float, Noticed]] = field(default_factory=list)
    troubles: list[tuple[float, str]] = field(default_factory=list)
    num_polls: int = 0
    num_steps: int = 0
    cpu_s: float = 0.0

    @property
    def num_alarms(self) -> int:
        return len(self.stalls) + len(self.noticed)

    def delay(self, found: Iterable[tuple[float, object]]) -> float | None:
        """Seconds from the onset to the first that came after it; None if there is none."""
        onset = self.tale.onset
        return next((when - onset for when, _ in found if onset is not None and when >= onset), None)

    @property
    def is_early(self) -> bool:
        """Whether anything was said to be wrong before it was."""
        onset = self.tale.onset if self.tale.onset is not None else float("inf")
        return any(when < onset for when, _ in [*self.stalls, *self.noticed])


def replay(tale: Tale) -> Seen:
    """Write the run and watch it, one look after the other."""
    folder = Path(tempfile.mkdtemp(prefix="bsl-watch-"))
    try:
        return _replay(tale, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replay(tale: Tale, folder: Path) -> Seen:
    attempt = AttemptDir(RunDir(folder).attempt("0001").path)
    attempt.make()
    reader: AttemptTail | LogTail = AttemptTail(attempt) if tale.attempt else LogTail(folder / LOG)
    tracker, seen = ProgressTracker(tale.expected), Seen(tale)
    events = sorted(tale.events, key=lambda event: event.time)
    starts, now, next_event = list(tale.new_attempts), tale.comes, 0
    last, looks = Pace.USUAL, False
    while now <= tale.until:
        next_event = _write(events, next_event, now, folder if not tale.attempt else attempt.path)
        begun = time.process_time()
        while starts and starts[0] <= now:
            tracker.new_attempt(starts.pop(0))
        log_events = reader.read()
        tracker.take(log_events, now, reader.blind)
        seen.num_steps += sum(log_event.kind == "step" for log_event in log_events)
        silence = tracker.silence(now)
        seen.cpu_s += time.process_time() - begun
        seen.num_polls += 1
        seen.noticed += [(now, noticed) for noticed in tracker.noticed()]
        seen.troubles += [(now, trouble) for trouble in reader.blind]
        if silence.pace is Pace.TOO_LONG and last is not Pace.TOO_LONG:
            seen.stalls.append((now, silence))
        if silence.look_in_s <= 0 and not looks:
            seen.looks.append((now, silence))
        last, looks = silence.pace, silence.look_in_s <= 0
        now += tale.poll_s
    return seen


def _write(events: list[Event], first: int, now: float, folder: Path) -> int:
    """Do what happens until now, and return the number of the next event."""
    pending: dict[str, list[str]] = {}
    while first < len(events) and events[first].time <= now:
        event = events[first]
        if event.act is not None:
            _flush(pending, folder)
            event.act(folder)
        if event.text:
            pending.setdefault(event.file, []).append(event.text)
        first += 1
    _flush(pending, folder)
    return first


def _flush(pending: dict[str, list[str]], folder: Path) -> None:
    for file, texts in pending.items():
        with (folder / file).open("a", encoding="utf-8") as stream:
            stream.write("".join(texts))
    pending.clear()
