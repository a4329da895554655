"""Stopping: a signal only raises a flag; all ranks agree on it at a step boundary, so none is left in a collective."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class StopFlag:
    """Whether this rank was asked to stop. Made before torch is imported: a rank that starts must survive a signal."""

    def __init__(self) -> None:
        self.is_raised = False
        for number in SIGNALS:
            signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.is_raised = True

    def agree(self, device: torch.device) -> bool:
        """Whether any rank was asked to; a collective call with one answer."""
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(self.is_raised)], device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
