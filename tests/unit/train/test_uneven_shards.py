"""Who holds which shard of the optimizer with ZeRO-1, and that owners together have everything."""

from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.recover.holding import Holding, Shard, StateVersion, choose_version
from bigsci_launch.train.uneven.past import of_roles, wanted_by
from bigsci_launch.train.uneven.shards import OwnerShards

OWNERS = {"1": (0, 2, 5), "2": (1, 3)}
NO_GROUPS: Any = None


def shards_of(rank: int, copies: int | None) -> OwnerShards:
    return OwnerShards(NO_GROUPS, OWNERS, rank, copies)


@pytest.mark.parametrize(("copies", "lost"), [(1, 0), (2, 1), (3, 2), (None, 2)])
@pytest.mark.parametrize("length", [1, 2, 7, 30])
def test_as_many_lost_owners_as_there_are_further_copies_leave_everything(
    copies: int | None, lost: int, length: int
) -> None:
    version, ranks = StateVersion(1, 0), OWNERS["1"]
    held = {rank: shards_of(rank, copies).held("1.weight", length) for rank in ranks}
    for first in range(len(ranks)):
        gone = {ranks[(first + number) % len(ranks)] for number in range(lost)}
        left = [[Holding(version, tuple(held[rank]), {"1.weight": length})] for rank in ranks if rank not in gone]
        assert choose_version(left).version == version
    one_more = [[Holding(version, tuple(held[ranks[0]]), {"1.weight": length})]]
    if copies == 1 and length > 1:
        assert choose_version(one_more).version is None


def test_a_shard_has_as_many_holders_as_copies() -> None:
    found = shards_of(2, 2)
    assert found.held("1.weight", 30) == [Shard("1.weight", 10, 20), Shard("1.weight", 0, 10)]
    assert [found.holders(shard, 30) for shard in found.held("1.weight", 30)] == [(2, 5), (0, 2)]
    assert not shards_of(1, 2).is_cut("2.weight")
    assert shards_of(1, 2).held("2.weight", 30) == [Shard("2.weight", 0, 30)]


def test_masters_are_wanted_whole_and_moments_where_they_are_held() -> None:
    found = wanted_by({"1.weight": 30}, [Shard("1.weight", 10, 20)], lane=1)
    units = {shard.unit: (shard.start, shard.stop) for shard in found}
    assert units == {
        "master tp1 1.weight": (0, 30),
        "exp_avg tp1 1.weight": (10, 20),
        "exp_avg_sq tp1 1.weight": (10, 20),
    }
    assert len(of_roles([Shard("1.weight", 0, (1 << 22) + 1)])) == 6
