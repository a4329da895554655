"""Stops on a signal. It only raises a flag; ranks agree on it in their words at the end of a step."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class StopFlag:
    """Whether this rank was asked to stop. Create it before importing torch: a starting rank must survive a signal."""

    def __init__(self) -> None:
        self.is_raised = False
        for number in SIGNALS:
            signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.is_raised = True
