"""The exchanges of a step between all ranks, as rows of 64-bit integers."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from bigsci_launch.train.device.gpu import send


class Exchange:
    """The exchanges of a loop, which are collective calls over the world."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lent: list[weakref.ref[torch.Tensor]] = []

    def rows(self, row: Sequence[int], width: int) -> NDArray[np.int64]:
        """Return the row of every rank, filled up with zeros to `width`, as a table of (ranks, `width`)."""
        mine = torch.zeros(width, dtype=torch.int64)
        mine[: len(row)] = torch.tensor(row, dtype=torch.int64)
        mine = send(mine, self._device)
        everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        self._lent = [weakref.ref(tensor) for tensor in (mine, *everywhere)]
        dist.all_gather(everywhere, mine)
        table: NDArray[np.int64] = torch.stack(everywhere).cpu().numpy()
        return table

    def slowest(self, check_s: float, step_s: float) -> tuple[float, float]:
        """Return the seconds of the slowest check and of the fastest step of all ranks."""
        worst = torch.tensor([check_s, -step_s], dtype=torch.float64, device=self._device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst[0]), -float(worst[1])

    def settle(self, grace_s: float = 1.0) -> None:
        """Wait until the process group has let go of the last exchange; not collective.

        A thread of gloo drops its tensors some time after the call has returned, and takes Python's lock for it. In an
        interpreter that is ending by then it aborts the process, and a loop that has finished looks crashed
        (PyTorch issue 190489).
        """
        until = time.monotonic() + grace_s
        while any(tensor() is not None for tensor in self._lent) and time.monotonic() < until:
            time.sleep(0.001)
