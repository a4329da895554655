"""Stops on a signal. It only raises a flag; ranks agree at a step boundary, so none is left in a collective."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class StopFlag:
    """Whether this rank was asked to stop. Create it before importing torch: a starting rank must survive a signal."""

    def __init__(self) -> None:
        self.is_raised = False
        for number in SIGNALS:
            signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.is_raised = True

    def agree(self, device: torch.device) -> bool:
        """Return whether any rank was asked to stop; a collective call with the same answer on every rank."""
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(self.is_raised)], device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
