"""Whether steps have become slower, for each global batch size: a change of the median that lasts."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from bigsci_launch.loss_jump import MAD
from bigsci_launch.watch.judge.silence import Noticed

BEFORE, RECENT = 200, 8
MIN_BEFORE = 20
"""Fewer steps than this tell nothing of the usual noise."""
LEAST_CHANGE = 0.03
LEAST_NOISE = 0.002
SPREADS = 4.0
MOST_SIZES = 8


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step without a pause in it. `time` is by the clock of its source; None if it has none."""

    step: int
    seconds: float
    time: float | None


@dataclass(slots=True)
class Series:
    """The steps of one batch size. `usual` and `limit` are fixed while they are slower than usual."""

    before: deque[TimedStep] = field(default_factory=lambda: deque(maxlen=BEFORE))
    recent: deque[TimedStep] = field(default_factory=lambda: deque(maxlen=RECENT))
    usual: float = 0.0
    limit: float = 0.0
    since: int | None = None

    def measure(self) -> None:
        """Measure what is usual, and how much more is noise."""
        seconds = [each.seconds for each in self.before]
        self.usual = statistics.median(seconds)
        spread = statistics.median(abs(each - self.usual) for each in seconds) / MAD
        noise = max(spread, LEAST_NOISE * self.usual)
        self.limit = max(LEAST_CHANGE * self.usual, SPREADS * noise)

    @property
    def level(self) -> float:
        return statistics.median(each.seconds for each in self.recent)

    @property
    def halfway(self) -> float:
        return self.usual + self.limit / 2


class StepTimes:
    """Notices when steps become slower, once, and when that is over."""

    def __init__(self) -> None:
        self._series: dict[int | None, Series] = {}

    def restart(self) -> None:
        """Note that the run starts again: what is recent must not reach across."""
        for series in self._series.values():
            series.recent.clear()

    def add(self, taken: TimedStep, size: int | None) -> Noticed | None:
        """Take a step, and return what it shows; None if nothing new."""
        series = self._series.setdefault(size, Series())
        if len(self._series) > MOST_SIZES:
            del self._series[next(iter(self._series))]
        if len(series.recent) == RECENT and series.since is None:
            series.before.append(series.recent[0])
        series.recent.append(taken)
        if len(series.recent) < RECENT or len(series.before) < MIN_BEFORE:
            return None
        return _find_begin(series) if series.since is None else _find_end(series)


def _find_begin(series: Series) -> Noticed | None:
    series.measure()
    num_slow = sum(each.seconds > series.halfway for each in series.recent)
    if series.level - series.usual <= series.limit or num_slow < RECENT - 1:
        return None
    first = _first_slow(series)
    series.since = first.step
    more = series.level / series.usual - 1
    return Noticed(
        "slower",
        first.step,
        f"since step {first.step}, steps take {series.level:.4g} s instead of {series.usual:.4g} s, {more:.1%} longer",
        first.time,
    )


def _first_slow(series: Series) -> TimedStep:
    """Return the step from which on all were slow, up to one."""
    steps = [*series.before, *series.recent]
    first = len(steps) - RECENT
    while first > 0 and steps[first - 1].seconds > series.halfway:
        first -= 1
    return next(each for each in steps[first:] if each.seconds > series.halfway)


def _find_end(series: Series) -> Noticed | None:
    if series.level > series.halfway or series.since is None:
        return None
    since, series.since = series.since, None
    first = next((each for each in series.recent if each.seconds <= series.halfway), series.recent[-1])
    return Noticed(
        "slower",
        since,
        f"since step {first.step}, steps take {series.level:.4g} s again, as before step {since}",
        first.time,
        is_over=True,
    )
