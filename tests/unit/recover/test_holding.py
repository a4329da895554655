"""Who holds what, which state can be restored, and what is sent where."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest

from bigsci_launch.recover.holding import (
    Holding,
    Manifest,
    Shard,
    StateVersion,
    Transfer,
    choose_version,
    keepers,
    plan_transfers,
)

LENGTH = 100
WHOLE = {"a": LENGTH, "b": LENGTH}
V4, V5 = StateVersion(4, 0), StateVersion(5, 0)


def cut(unit: str, dp: int, index: int) -> Shard:
    """The shard of one of `dp` replicas; the last one is shorter."""
    size = -(-LENGTH // dp)
    return Shard(unit, min(index * size, LENGTH), min((index + 1) * size, LENGTH))


def layout(dp: int) -> list[tuple[Shard, ...]]:
    """Units a and b on `dp` replicas each: ranks 0 to dp-1 have a."""
    return [(cut(unit, dp, index),) for unit in WHOLE for index in range(dp)]


def held(versions: Iterable[StateVersion], *shards: Shard) -> list[Holding]:
    return [Holding(version, shards, WHOLE) for version in versions]


def with_buddies(dp: int, versions: Sequence[StateVersion], nodes: Sequence[str] | None = None) -> list[list[Holding]]:
    shards = layout(dp)
    manifests = [held(versions, *own) for own in shards]
    for rank, keeper in enumerate(keepers(nodes or ["n"] * len(shards), [0] * len(shards))):
        manifests[keeper] += held(versions, *shards[rank])
    return manifests


def test_a_buddy_is_on_another_node_if_there_is_one() -> None:
    for nodes in (
        ["n0", "n0", "n1", "n1"],
        ["n0", "n1", "n0", "n1"],
        ["n0", "n1", "n2"],
        list("aaabbbccc"),
        list("aab"),
    ):
        found = keepers(nodes, [0] * len(nodes))
        assert all(nodes[rank] != nodes[keeper] for rank, keeper in enumerate(found)), (nodes, found)
    assert keepers(["n0", "n0", "n1", "n1"], [0, 0, 1, 1]) == [2, 3, 0, 1]
    assert keepers(["n0", "n0", "n1", "n1"], [0, 1, 0, 1]) == [3, 2, 1, 0], "and in another replica"
    assert keepers(["n"] * 4, [0, 1, 2, 3]) == [1, 2, 3, 0]
    assert keepers(["n"] * 4, [0, 0, 1, 1]) == [2, 3, 0, 1], "a replica may leave"
    assert keepers(["n"], [0]) == [0]


@pytest.mark.parametrize("nodes", [list("aaabbbccc"), list("aabb"), list("abab"), list("aabbb"), list("nnnn")])
def test_every_rank_keeps_one_copy_where_no_node_has_most_of_the_ranks(nodes: Sequence[str]) -> None:
    fits = max(map(nodes.count, nodes)) * 2 <= len(nodes) or len(set(nodes)) == 1
    assert (sorted(keepers(nodes, [0] * len(nodes))) == list(range(len(nodes)))) == fits


def test_one_lost_rank_costs_nothing_and_a_lost_pair_is_named() -> None:
    manifests = with_buddies(2, [V4, V5])
    for lost in range(4):
        left: list[Manifest] = [[] if rank == lost else each for rank, each in enumerate(manifests)]
        assert choose_version(left).version == V5
    for lost in range(4):
        pair = {lost, (lost + 1) % 4}
        left = [[] if rank in pair else each for rank, each in enumerate(manifests)]
        found = choose_version(left)
        assert found.version is None and found.why is not None
        assert layout(2)[lost][0].unit in found.why and "step 5" in found.why


def test_a_lost_node_costs_nothing_where_buddies_are_elsewhere() -> None:
    nodes = ["n0", "n0", "n1", "n1"]
    manifests = with_buddies(2, [V5], nodes)
    for node in set(nodes):
        left = [[] if nodes[rank] == node else each for rank, each in enumerate(manifests)]
        assert choose_version(left).version == V5


def test_the_newest_state_that_is_complete_is_chosen() -> None:
    manifests = with_buddies(2, [V4])
    manifests[0] += held([V5], *layout(2)[0])
    assert choose_version(manifests).version == V4
    assert choose_version([[], []]).version is None


def test_the_same_step_of_another_generation_is_another_state() -> None:
    again = StateVersion(5, 1)
    manifests = [held([V5], cut("a", 2, 0)), held([again], cut("a", 2, 1)), held([V5, again], Shard("b", 0, LENGTH))]
    assert choose_version(manifests).version is None
    manifests[0] += held([again], cut("a", 2, 0))
    assert choose_version(manifests).version == again


@pytest.mark.parametrize(("before", "after"), list(itertools.product([1, 2, 3, 4], repeat=2)))
def test_every_wanted_element_comes_once_and_from_a_holder(before: int, after: int) -> None:
    manifests = with_buddies(before, [V5])
    ranks = max(2 * before, 2 * after)
    manifests += [[] for _ in range(ranks - len(manifests))]
    manifests[0] = []
    wanted = [*layout(after), *[()] * (ranks - 2 * after)]
    if before == 1:
        assert choose_version(manifests).version == V5
    plan = plan_transfers(manifests, V5, wanted)
    for rank, shards in enumerate(wanted):
        for shard in shards:
            got = sorted(
                (each.shard.start, each.shard.stop)
                for each in plan
                if each.destination == rank and each.shard.unit == shard.unit
            )
            assert [start for start, _ in got] == [shard.start, *[stop for _, stop in got][:-1]][: len(got)]
            assert not got or got[-1][1] == shard.stop
            assert got or shard.start == shard.stop
    for each in plan:
        assert any(
            shard.unit == each.shard.unit and shard.start <= each.shard.start and shard.stop >= each.shard.stop
            for holding in manifests[each.source]
            for shard in holding.shards
        )


def test_ranks_with_other_coordinates_get_their_part_from_those_that_had_it() -> None:
    manifests = with_buddies(2, [V5])
    wanted = [layout(2)[3], layout(2)[2], layout(2)[1], layout(2)[0]]
    plan = plan_transfers(manifests, V5, wanted)
    # Each rank keeps what it holds of others: rank 0 has the copy of rank 3.
    assert plan[0] == Transfer(layout(2)[3][0], 0, 0)
    assert {each.destination for each in plan if each.source != each.destination} == {1, 3}


def test_what_is_sent_is_shared_among_those_that_hold_it() -> None:
    everything = [Shard("a", 0, LENGTH), Shard("b", 0, LENGTH)]
    manifests: list[Manifest] = [held([V5], *everything), held([V5], *everything), [], []]
    plan = plan_transfers(manifests, V5, [(), (), (everything[0],), (everything[1],)])
    assert sorted(each.source for each in plan) == [0, 1]


def test_what_nobody_held_is_left_out() -> None:
    manifests = with_buddies(1, [V5])
    assert plan_transfers(manifests, V5, [[Shard("dp1 pp0 tp0", 0, 8)], []]) == []
