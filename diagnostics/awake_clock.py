"""A clock that stands still while its own process does not run. Standard library only.

A job may be suspended, a virtual machine moved, a process stopped, and none of its loops notices. What it then takes
for the silence of others is its own. A time-out by this clock is extended by such pauses.

The copy in diagnostics/ is the same file: programs there have no package.
"""

from __future__ import annotations

import time

PAUSE_S = 3.0
"""Readings that are further apart show that the process did not run."""


class AwakeClock:
    """Seconds, of which pauses are left out. It belongs to one thread, which reads it several times a second."""

    def __init__(self) -> None:
        self._read = time.monotonic()
        self._paused_s = 0.0

    def read(self) -> float:
        """Return the present time of this clock; the difference of two is the time awake between them."""
        before, self._read = self._read, time.monotonic()
        if self._read - before > PAUSE_S:
            self._paused_s += self._read - before
        return self._read - self._paused_s
