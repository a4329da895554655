"""Where each rank is: its index on each axis, and the ranks that share its groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from bigsci_launch.errors import BslError
from bigsci_launch.topology import AXIS_NAMES, Coordinate, Topology
from bigsci_launch.topology.naming import name_ranks_and_part
from bigsci_launch.train.guards.copies import CopyAxes
from bigsci_launch.train.rank.collective import gather

Members = Mapping[str, tuple[int, ...]]
"""The global ranks of the group on each axis, in the order of their index there."""


@dataclass(frozen=True, slots=True)
class Places:
    """This rank and the groups of every rank. `topology` is None if the ranks are not numbered in its order."""

    rank: int
    members: tuple[Members, ...]
    topology: Topology | None

    @classmethod
    def of_topology(cls, topology: Topology, rank: int) -> Places:
        """The places of a run whose ranks are numbered as `topology` says."""
        ranks = range(topology.world_size)
        return cls(rank, tuple({axis: topology.group(axis, each) for axis in AXIS_NAMES} for each in ranks), topology)

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def mine(self) -> Members:
        """The groups of this rank."""
        return self.members[self.rank]

    def copies(self, *axes: str) -> CopyAxes:
        """The ranks that hold the same as this one along `axes`."""
        return tuple((axis, self.mine[axis]) for axis in axes)

    def coordinate(self, rank: int) -> Coordinate:
        """The index of `rank` on each axis that the loop has named, 0 on the others."""
        if self.topology is not None and not self.topology.is_grid:
            return self.topology.coordinate(rank)
        return Coordinate.at(**{axis: ranks.index(rank) for axis, ranks in self.members[rank].items()})

    def describe(self, ranks: Collection[int]) -> str:
        """`rank 3 (dp1 pp0 tp1)`, `ranks 4-7 (pp1)`."""
        if self.topology is None and len(ranks) == 1:
            return f"rank {min(ranks)} ({self.coordinate(min(ranks))})"
        return name_ranks_and_part(ranks, self.topology)


def find_places(groups: Mapping[str, Any] | None) -> Places:
    """Exchange which ranks belong together; a collective call over the world.

    `groups` are process groups, or one-dimensional device meshes, by axis. Without any, all ranks are data-parallel.

    Raises:
        BslError: an axis that is not known, or torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise BslError(
            "torch.distributed is not initialized", hint="make the Guards after init_process_group, on every rank"
        )
    mine = {axis: _ranks(group) for axis, group in (groups or {"dp": dist.group.WORLD}).items() if group is not None}
    if unknown := sorted(mine.keys() - set(AXIS_NAMES)):
        raise BslError(f"groups: unknown axis {unknown[0]!r}", hint=f"the axes are {', '.join(AXIS_NAMES)}")
    return places_of(dist.get_rank(), gather(mine))


def places_of(rank: int, members: Sequence[Members]) -> Places:
    """Return the places that follow from the groups of all ranks."""
    without = Places(rank, tuple(members), None)
    sizes = {axis: len(ranks) for axis, ranks in members[0].items()}
    topology = Topology(**sizes)
    if topology.world_size != len(members):
        return without
    found = [without.coordinate(number) for number in range(len(members))]
    is_usual = all(
        found[number][axis] == topology.coordinate(number)[axis] for number in range(len(members)) for axis in sizes
    )
    return Places(rank, tuple(members), topology) if is_usual else without


def _ranks(group: Any) -> tuple[int, ...]:
    process_group = group.get_group() if hasattr(group, "get_group") else group
    return tuple(dist.get_process_group_ranks(process_group))
