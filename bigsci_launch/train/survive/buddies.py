"""Each rank's copy is also kept by a buddy, on another node if there is one. Sending overlaps the next step.

The copies travel over a gloo group of their own, from host memory to host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigsci_launch.train.rank.collective import gather
from bigsci_launch.train.survive.snapshot import Copy
from bigsci_launch.train.survive.waits import Waits

CHUNK_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class HostGroup:
    """The group in which ranks exchange what is in host memory."""

    group: dist.ProcessGroup
    rank: int
    waits: Waits

    def gather(self, mine: Any) -> list[Any]:
        """Return what every rank gives, by rank; a collective call."""
        with self.waits.for_gloo():
            return gather(mine, self.group)

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        return dist.isend(tensor, to, self.group, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(tensor, source, self.group, tag)

    def wait(self, works: Iterable[Any]) -> None:
        """Wait until what `send` and `receive` have begun is done."""
        for work in works:
            self.waits.wait(work)


class Buddies:
    """The ranks with which this one exchanges copies; `keepers` names the keeper of each rank."""

    def __init__(self, group: HostGroup, keepers: Sequence[int]) -> None:
        self._group = group
        self.keeper = keepers[group.rank]
        self.kept = [rank for rank, keeper in enumerate(keepers) if keeper == group.rank != rank]
        self._works: list[Any] = []
        self._arriving: list[Copy] = []

    def begin(self, own: Copy, arriving: Iterable[tuple[int, Copy]]) -> None:
        """Begin to send `own` to the keeper, and to receive copies of the ranks given with them."""
        self.wait()
        for source, copy in arriving:
            self._arriving.append(copy)
            self._works += [self._group.receive(chunk, source, tag) for tag, chunk in _chunks(copy.buffer)]
        if self.keeper != self._group.rank:
            self._works += [self._group.send(chunk, self.keeper, tag) for tag, chunk in _chunks(own.buffer)]

    def wait(self) -> None:
        """Wait until what has begun is done. Copies that have arrived are complete then."""
        self._group.wait(self._works)
        for copy in self._arriving:
            copy.is_complete = True
        self._works, self._arriving = [], []


def _chunks(buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    return enumerate(torch.split(buffer, CHUNK_BYTES))
