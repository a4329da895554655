"""How often a run shows anything at all, and after which silence its ranks are worth a look. Pure.

A look pauses no rank and accuses none by itself, so it may come early: after twice what is usual, long before the clock
alone would call the silence long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from bigsci_launch.watch.judge.durations import LONG, Usual

LEAST_LOOK_S = 5.0
"""A shorter silence may be the buffers of a program, or of a file system."""
OUTPUT_LOOK_S = 10.0
"""The same, where lines are not understood: they come less evenly than steps. It also counts after an error."""
UNKNOWN_LOOK_S, CALLS_LOOK_S = 30.0, 8.0
"""A run whose rhythm is not known is looked at after this long; sooner where rings show its calls, without a buffer."""
FEW_GAPS, RECENT_GAPS = 2, 64


class Pulse:
    """The times at which something new came, of one kind, by the watcher's clock.

    A silence of less than `least_s` is worth no look; without a known rhythm, one of `unknown_s` is.
    """

    def __init__(self, least_s: float, unknown_s: float = UNKNOWN_LOOK_S) -> None:
        self._least_s = least_s
        self._unknown_s = unknown_s
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
            return self._unknown_s
        return max(self._least_s, LONG * sorted(self._gaps)[-2])

    def look_in_s(self, now: float) -> float:
        """In how many seconds the silence is worth a look, 0 or less: now; infinite if nothing ever came."""
        return math.inf if self._last is None else self.look_after_s - (now - self._last)

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
