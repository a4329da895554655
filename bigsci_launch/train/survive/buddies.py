"""Each rank's copy is also kept by a buddy, on another node if there is one. Sending overlaps the next step.

The copies travel over a gloo group of their own, from host memory to host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigsci_launch.train.survive.snapshot import Copy

CHUNK_BYTES = 1 << 28


class Buddies:
    """The ranks with which this one exchanges copies; `keepers` names the keeper of each rank."""

    def __init__(self, group: dist.ProcessGroup, keepers: Sequence[int], rank: int) -> None:
        self._group, self._rank = group, rank
        self.keeper = keepers[rank]
        self.kept = [other for other, keeper in enumerate(keepers) if keeper == rank and other != rank]
        self._works: list[Any] = []
        self._arriving: list[Copy] = []

    def begin(self, own: Copy | None, arriving: Iterable[tuple[int, Copy]]) -> None:
        """Begin to send `own` to the keeper, and to receive copies of the ranks given with them."""
        self.wait()
        for source, copy in arriving:
            self._arriving.append(copy)
            self._works += [dist.irecv(chunk, source, self._group, tag) for tag, chunk in _chunks(copy.buffer)]
        if own is not None and self.keeper != self._rank:
            self._works += [dist.isend(chunk, self.keeper, self._group, tag) for tag, chunk in _chunks(own.buffer)]

    def wait(self) -> None:
        """Wait until what has begun is done. Copies that have arrived are complete then."""
        for work in self._works:
            work.wait()
        for copy in self._arriving:
            copy.is_complete = True
        self._works, self._arriving = [], []


def _chunks(buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    return enumerate(torch.split(buffer, CHUNK_BYTES))
