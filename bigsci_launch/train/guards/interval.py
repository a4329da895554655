"""How many steps lie between two checks with `interval: auto`. Pure: what checks and steps have taken in, steps out.

A check that the machine held up says nothing about what checks cost. So the least of several timings counts, and for
steps the median. However dear checks are, at most `MOST_STEPS` steps and `MOST_SECONDS` of training lie between two.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from bigsci_launch.train.guards.ratios import ratio

MOST_STEPS = 100
"""What a defect may spoil before it is found; so few are computed again in minutes."""
MOST_SECONDS = 300.0
"""The same for long steps."""
FEWEST, NEWEST = 3, 8
"""Timings before the first choice, and timings that count."""
_SHORTEST_S = 1e-6
# Timings vary: an interval that is nearly right stays.
_KEPT = 0.25


@dataclass(frozen=True, slots=True)
class IntervalChoice:
    """An interval, and what it was chosen for: the seconds of a check and of a step."""

    interval: int
    check_s: float
    step_s: float

    @property
    def share(self) -> float:
        """The share of the training time that checks take."""
        return ratio(self.check_s, self.interval * self.step_s)

    def __str__(self) -> str:
        return (
            f"{self.check_s * 1e3:.1f} ms per check, every {self.interval} steps of {self.step_s * 1e3:.0f} ms: "
            f"{self.share:.2%}"
        )

    def record(self) -> dict[str, float]:
        """Return the fields of the event `guards`."""
        fields = {"interval": self.interval, "seconds": self.check_s, "step_seconds": self.step_s}
        return {**fields, "share": self.share}


@dataclass(slots=True)
class AutoInterval:
    """The timings of a run, and the interval chosen from them. `aim` is the share of the time that checks may take.

    Until there are enough timings, every step is checked.
    """

    aim: float
    interval: int = 1
    _checks: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    _has_chosen: bool = False

    def add(self, check_s: float, step_s: float) -> IntervalChoice | None:
        """Take in what a check and its step have taken; return the choice if it is the first one, or another one."""
        if not (math.isfinite(check_s) and math.isfinite(step_s)):
            return None
        self._checks.append(max(0.0, check_s))
        self._steps.append(max(_SHORTEST_S, step_s))
        if len(self._checks) < FEWEST:
            return None
        cheapest, usual = min(self._checks), median(self._steps)
        found = IntervalChoice(interval_for(cheapest, usual, self.aim), cheapest, usual)
        if self._has_chosen and abs(found.interval - self.interval) <= _KEPT * self.interval:
            return None
        self._has_chosen, self.interval = True, found.interval
        return found


def interval_for(check_s: float, step_s: float, aim: float) -> int:
    """Return the shortest interval that keeps checks within `aim` of the time, or the longest one that is allowed."""
    longest = max(1, math.floor(min(MOST_STEPS, MOST_SECONDS / step_s)))
    return max(1, math.ceil(min(check_s / (aim * step_s), longest)))
