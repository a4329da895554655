"""Which part of the optimizer's state of a parameter a rank holds, and how owners put it together.

Without ZeRO, every owner of a unit has the whole state. With ZeRO-1, the state of each parameter is cut into as many
shards as it has owners, and each owner holds its own and those of the owners before it: f further copies. All owners
have the sum of the gradients, so each computes what it holds, and no copy is ever sent while training runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bigsci_launch.recover.holding import Shard
from bigsci_launch.train.uneven.reduction import OwnerGroups
from bigsci_launch.train.uneven.stage import Unit, unit_of

PartOf = Callable[[Shard], Tensor]
"""Returns the elements of a shard that this rank holds."""


class OwnerShards:
    """The shards of a layout. `copies` is how many owners hold each, None for all of them."""

    def __init__(
        self, groups: OwnerGroups, owners: Mapping[Unit, tuple[int, ...]], rank: int, copies: int | None
    ) -> None:
        self._groups, self._owners, self._rank, self._copies = groups, owners, rank, copies

    def _ranks(self, name: str) -> tuple[int, ...]:
        return self._owners[unit_of(name)]

    def is_cut(self, name: str) -> bool:
        """Whether no owner of a parameter has all of its state."""
        return self._copies is not None and self._copies < len(self._ranks(name))

    def held(self, name: str, length: int) -> list[Shard]:
        """Return the shards of a parameter of this length that this rank holds, its own first."""
        if not self.is_cut(name):
            return [Shard(name, 0, length)]
        ranks, cut = self._ranks(name), self._cut(name, length)
        at = ranks.index(self._rank)
        numbers = [(at - behind) % len(ranks) for behind in range(self._copies or 1)]
        return [cut[number] for number in numbers if cut[number].start < cut[number].stop]

    def holders(self, shard: Shard, length: int) -> tuple[int, ...]:
        """Return the ranks that hold a shard."""
        ranks = self._ranks(shard.unit)
        if not self.is_cut(shard.unit):
            return ranks
        number = self._cut(shard.unit, length).index(shard)
        return tuple(sorted(ranks[(number + ahead) % len(ranks)] for ahead in range(self._copies or 1)))

    def _cut(self, name: str, length: int) -> list[Shard]:
        """Return a shard for each owner; those of a short parameter may be empty."""
        count = len(self._ranks(name))
        size = -(-length // count)
        return [Shard(name, min(number * size, length), min((number + 1) * size, length)) for number in range(count)]

    @torch.no_grad()
    def whole(self, lengths: Mapping[str, int], part: PartOf, like: Tensor) -> dict[str, Tensor]:
        """Return all elements of each parameter that is cut, flat; a collective call of the owners of each unit.

        Each owner gives its own shard. The result has the type and the device of `like`.
        """
        found: dict[str, Tensor] = {}
        for group, units in self._groups.shared():
            names = [name for name in lengths if unit_of(name) in units and self.is_cut(name)]
            if names:
                found |= self._gather(group, names, lengths, part, like)
        return found

    def _gather(
        self, group: dist.ProcessGroup, names: Sequence[str], lengths: Mapping[str, int], part: PartOf, like: Tensor
    ) -> dict[str, Tensor]:
        ranks = self._ranks(names[0])
        shards = [[self._cut(name, lengths[name])[number] for name in names] for number in range(len(ranks))]
        parts = [part(shard) for shard in shards[ranks.index(self._rank)] if shard.start < shard.stop]
        room = max(sum(shard.stop - shard.start for shard in own) for own in shards)
        mine = like.new_zeros(room)
        if parts:
            flat = torch.cat(parts)
            mine[: len(flat)] = flat
        everywhere = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(everywhere, mine, group=group)
        found = {name: like.new_empty(lengths[name]) for name in names}
        for own, given in zip(shards, everywhere, strict=True):
            sizes = [shard.stop - shard.start for shard in own]
            for shard, piece in zip(own, torch.split(given[: sum(sizes)], sizes), strict=True):
                found[shard.unit][shard.start : shard.stop] = piece
        return found
