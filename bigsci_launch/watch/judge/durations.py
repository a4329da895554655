"""How long phases have taken lately, and from when on one takes too long."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

RECENT = 32
FEW = 5
"""With fewer steps than this, nothing is known of their usual length."""

LONG, TOO_LONG, OVER_LONGEST = 2.0, 4.0, 1.5
LEAST_LONG_S, LEAST_TOO_LONG_S = 10.0, 60.0
"""A shorter silence may be the buffers of a program, or of a file system."""
LEAST_START_S = 600.0
"""Starts differ: whether files are in a cache makes minutes."""
GENEROUS_S, GENEROUS_STEPS = 1800.0, 20
"""A phase of unknown length has ended in this time, or in so many steps, whichever is longer."""


@dataclass(frozen=True, slots=True)
class Usual:
    """The median of a phase, and the longest that it has taken lately, in seconds."""

    median: float
    longest: float
    least_too_long: float = LEAST_TOO_LONG_S

    @property
    def long(self) -> float:
        return max(LEAST_LONG_S, LONG * self.median)

    @property
    def too_long(self) -> float:
        return max(self.least_too_long, TOO_LONG * self.median, OVER_LONGEST * self.longest)


class Durations:
    """Recent durations of one phase. `expected` counts until the phase was seen `few` times."""

    def __init__(self, expected: float | None = None, few: int = 1, least_too_long: float = LEAST_TOO_LONG_S) -> None:
        self._expected = expected
        self._few = few
        self._least = least_too_long
        self._recent: deque[float] = deque(maxlen=RECENT)

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)

    @property
    def usual(self) -> Usual | None:
        """What is usual; None if it is not known."""
        if len(self._recent) >= self._few:
            return Usual(statistics.median(self._recent), max(self._recent), self._least)
        if self._expected is not None:
            return Usual(self._expected, max(self._recent, default=self._expected), self._least)
        return None


class StepDurations:
    """Durations of steps, for each global batch size: a stage of the ramp-up may take longer."""

    def __init__(self, expected: float | None = None) -> None:
        self._expected = expected
        self._by_size: dict[int | None, Durations] = {}
        self._size: int | None = None

    def resize(self, size: int | None) -> None:
        """Note the batch size of the steps that follow; None if unknown. The first one is that of all before it."""
        if size is None or size == self._size:
            return
        if self._size is None and None in self._by_size:
            self._by_size[size] = self._by_size.pop(None)
        self._expected = self._scaled(size)
        self._size = size

    def rescale(self, factor: float) -> None:
        """Note that steps take another time from now on, about `factor` times as long: other ranks share the work."""
        usual = self.usual
        self._by_size.clear()
        self._expected = usual.median * factor if usual else None

    def add(self, seconds: float) -> None:
        """Note a step of the batch size seen last."""
        self._by_size.setdefault(self._size, Durations(self._expected, FEW)).add(seconds)

    def _scaled(self, size: int) -> float | None:
        """Return what a step of a new batch size may take, from that of the size before."""
        usual = self.usual
        return usual.median * max(1.0, size / self._size) if usual and self._size else self._expected

    @property
    def usual(self) -> Usual | None:
        return self._by_size.get(self._size, Durations(self._expected, FEW)).usual


def generous(step: Usual | None) -> float:
    """Return how long a phase of unknown length may take."""
    return max(GENEROUS_S, GENEROUS_STEPS * step.median) if step else GENEROUS_S
