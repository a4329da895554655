"""Sums the gradients of each unit over its owners.

Owner sets overlap, so every rank must begin the sums in the same order: that of the first unit of each set. Units with
the same owners share a buffer. A set of ranks has one process group, whatever it is used for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bigsci_launch.plan.survive.uneven import UnevenLayout
from bigsci_launch.train.uneven.stage import Unit

BUCKET_BYTES = 1 << 28


class OwnerGroups:
    """The process groups of a layout; to make them is a collective call."""

    def __init__(self, layout: UnevenLayout, owners: Sequence[Mapping[Unit, tuple[int, ...]]], rank: int) -> None:
        """`owners` are those of each lane."""
        self._rank = rank
        self._units: dict[tuple[int, ...], list[Unit]] = {}
        for unit, ranks in ((unit, ranks) for lane in owners for unit, ranks in lane.items()):
            self._units.setdefault(ranks, []).append(unit)
        pipelines = [each.ranks for lane in layout.lanes for each in lane.pipelines]
        wanted = dict.fromkeys([*pipelines, *(ranks for ranks in self._units if len(ranks) > 1)])
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {
            ranks: dist.new_group(list(ranks)) for ranks in wanted
        }

    def of(self, pipeline: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the group of the ranks of a pipeline."""
        return self._groups[pipeline]

    def shared(self) -> Iterator[tuple[dist.ProcessGroup, list[Unit]]]:
        """Yield the group and the units of each set of several owners with this rank, in the order of all ranks."""
        for ranks, units in self._units.items():
            if self._rank in ranks and len(ranks) > 1:
                yield self._groups[ranks], units

    def sum(self, gradients: Mapping[Unit, Sequence[Tensor]]) -> None:
        """Sum the gradients of this rank's units over their owners, in place; a collective call."""
        for group, units in self.shared():
            for bucket in _buckets(tensor for unit in units for tensor in gradients[unit]):
                _sum_together(bucket, group)

    def counted(self) -> list[Unit]:
        """Return the units that this rank counts where each must count once."""
        return [unit for ranks, units in self._units.items() if ranks[0] == self._rank for unit in units]


def _buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def _sum_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
