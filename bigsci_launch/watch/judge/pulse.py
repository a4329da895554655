"""How often a run shows anything at all, and after which silence its ranks are worth a look. Pure.

A look pauses no rank and accuses none by itself, so it may come early: after twice what is usual, long before the clock
alone would call the silence long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from bigsci_launch.watch.judge.durations import LONG, Usual

LEAST_LOOK_S = 5.0
"""A shorter silence may be the buffers of a program, or of a file system."""
OUTPUT_LOOK_S = 10.0
"""The same, where lines are not understood: they come less evenly than steps. It also counts after an error."""
UNKNOWN_LOOK_S = 30.0
"""A run whose rhythm is not known is looked at after this long."""
FEW_GAPS, RECENT_GAPS = 2, 64


class Pulse:
    """The times at which something new came, of one kind, by the watcher's clock."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._gaps: deque[float] = deque(maxlen=RECENT_GAPS)
        self._last: float | None = None

    def beat(self, now: float) -> None:
        """Note that something new came."""
        if self._last is not None:
            self._gaps.append(now - self._last)
        self._last = now

    def restart(self) -> None:
        """Note that the run starts again: a start has another rhythm."""
        self._gaps.clear()
        self._last = None

    @property
    def look_after_s(self) -> float:
        """How long a silence is worth a look: twice the longest gap of late, except for one, as of a start."""
        if len(self._gaps) < FEW_GAPS:
            return UNKNOWN_LOOK_S
        return max(self._least_s, LONG * sorted(self._gaps)[-2])

    def silent_s(self, now: float) -> float | None:
        """How long nothing has come; None if nothing ever came."""
        return None if self._last is None else now - self._last


def look_after(known: Iterable[Usual], output: Pulse) -> float:
    """Return after how long a silence the ranks are worth a look.

    `known` is the usual length of the phases that are due. Where none is known, the rhythm of the output counts, as far
    as that is short.
    """
    medians = [each.median for each in known]
    if not medians:
        return min(UNKNOWN_LOOK_S, output.look_after_s)
    return max(LEAST_LOOK_S, LONG * max(medians))


def look_in(lasts_s: float, after_s: float, calls: Pulse, now: float) -> float:
    """Return in how many seconds the ranks are worth a look; 0 or less: now.

    Calls of the ranks can only bring it forward: they must have stopped for as long as the output.
    """
    by_output, quiet_s = after_s - lasts_s, calls.silent_s(now)
    return by_output if quiet_s is None else min(by_output, calls.look_after_s - min(lasts_s, quiet_s))
