"""What is known of a run's course from any source: how long its phases take, and which may come next."""

from __future__ import annotations

from dataclasses import dataclass, field

from bigsci_launch.watch.judge.durations import LEAST_START_S, Durations, StepDurations, Usual
from bigsci_launch.watch.judge.intervals import Interval

WARM_UP = 3
"""The first steps after a start compile, fill caches and connect: they say nothing of the usual."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a run before it is watched: intervals in steps, 0 for never, and times in seconds.

    None: not known; it is then learned from what is seen.
    """

    step_time_s: float | None = None
    eval_interval: int | None = None
    eval_time_s: float | None = None
    save_interval: int | None = None
    save_time_s: float | None = None
    start_time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A phase that the run may be in. `usual` is None if its length is not known; `is_certain`: it is due.

    `in_parts`: it reports more than once, and `usual` is the time between two reports.
    """

    phase: str
    usual: Usual | None
    is_certain: bool
    in_parts: bool = False


@dataclass(slots=True)
class Learned:
    """Durations of each phase, and after which steps a run evaluates and saves. It outlives attempts."""

    expected: Expected
    step: StepDurations = field(init=False)
    phases: dict[str, Durations] = field(init=False)
    eval: Interval = field(init=False)
    save: Interval = field(init=False)

    def __post_init__(self) -> None:
        known = self.expected
        self.step = StepDurations(known.step_time_s)
        self.phases = {
            "start": Durations(known.start_time_s, least_too_long=LEAST_START_S),
            "eval": Durations(known.eval_time_s),
            "save": Durations(known.save_time_s),
            "copy": Durations(),
            "load": Durations(least_too_long=LEAST_START_S),
            "dump": Durations(),
        }
        self.eval, self.save = Interval(known.eval_interval), Interval(known.save_interval)

    def interval(self, phase: str) -> Interval:
        """Return when `eval` or `save` comes."""
        return self.eval if phase == "eval" else self.save

    def usual(self, phase: str) -> Usual | None:
        if phase == "step":
            return self.step.usual
        found = self.phases.get(phase)
        return found.usual if found is not None else None
