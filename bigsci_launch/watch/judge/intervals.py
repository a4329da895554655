"""After which steps a run evaluates or saves: as its run file says, as it prints itself, or as it was seen to do."""

from __future__ import annotations

import math
from collections import deque

SEEN = 8
"""Evaluations or saves from which an interval is learned, at least two of them."""


class Interval:
    """When one phase comes. `done` counts what a phase has reported since the last step, as one line per data set."""

    def __init__(self, expected: int | None) -> None:
        self._known = expected
        self._is_expected = expected is not None
        self._seen: deque[int] = deque(maxlen=SEEN)
        self._num_reports = 0
        self._most_reports = 0

    def is_said(self, interval: int) -> None:
        """Take an interval that the program printed; that of the run file is not replaced."""
        if not self._is_expected:
            self._known = interval

    def begins(self, step: int) -> None:
        """Note that the phase was seen after a step."""
        if not self._seen or self._seen[-1] != step:
            self._seen.append(step)

    def reports(self, step: int) -> None:
        """Note that the phase has printed something."""
        self.begins(step)
        self._num_reports += 1

    def next_step(self) -> None:
        """Note that the next step has been reported: the phase is over."""
        self._most_reports = max(self._most_reports, self._num_reports)
        self._num_reports = 0

    @property
    def was_seen(self) -> bool:
        return bool(self._seen)

    @property
    def has_reported(self) -> bool:
        return self._num_reports > 0

    @property
    def is_in_parts(self) -> bool:
        """Whether the phase reports more than once, as an evaluation of several data sets."""
        return max(self._most_reports, self._num_reports) > 1

    @property
    def interval(self) -> int | None:
        """The interval; 0 for never, None if it is not known."""
        if self._known is not None:
            return self._known
        return math.gcd(*self._seen) or None if len(self._seen) > 1 else None

    def is_due(self, step: int, stride: int) -> bool | None:
        """Whether the phase comes after `step` and before the next line, `stride` steps later; None if not known."""
        if self._most_reports and self._num_reports >= self._most_reports:
            return False
        interval = self.interval
        if interval is None:
            return None
        return interval > 0 and -(-step // interval) * interval < step + stride
