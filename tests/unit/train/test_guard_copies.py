"""Which tensors must be equal, and what is reported about those that are not."""

from __future__ import annotations

import numpy as np
import pytest

from bigsci_launch.topology import Topology
from bigsci_launch.train.guards.copies import CopyChecker, Violation, Watched, by_cause, counted_once, find_split, merge
from bigsci_launch.train.guards.places import Places, places_of
from bigsci_launch.train.rank.bits import as_bits

pytestmark = pytest.mark.torch

SHAPE = Topology(tp=2, pp=2, dp=2)
TIED = "tied_modules.embedding.weight"


def watched_by(rank: int) -> list[Watched]:
    places = Places.of_topology(SHAPE, rank)
    stage = SHAPE.coordinate(rank).pp_rank
    return [
        Watched(TIED, places.copies("dp", "pp")),
        Watched(f"{stage}.norm", places.copies("dp", "tp")),
        Watched(f"{stage}.matrix", places.copies("dp")),
        Watched(f"gradient of {TIED}", places.copies("pp"), "tied gradients"),
    ]


WATCHED = [watched_by(rank) for rank in range(8)]


def healthy() -> np.ndarray:
    """A digest per rank and column such that copies are equal and all other digests differ."""
    table = np.empty((8, 4), np.int64)
    for rank in range(8):
        at = SHAPE.coordinate(rank)
        table[rank, :3] = [at.tp_rank, 100 + at.pp_rank, 200 + 10 * at.pp_rank + at.tp_rank]
        table[rank, 3] = 300 + 10 * at.tp_rank + at.dp_rank
    return table


def test_copies_that_are_equal_give_nothing() -> None:
    assert CopyChecker(WATCHED).find_unequal(healthy()) == []


@pytest.mark.parametrize(
    ("rank", "column", "checks"),
    [
        (6, 0, {"data-parallel copies", "tied copies"}),
        (7, 1, {"data-parallel copies", "tensor-parallel copies"}),
        (5, 2, {"data-parallel copies"}),
        (4, 3, {"tied gradients"}),
    ],
)
def test_one_copy_that_differs_is_named(rank: int, column: int, checks: set[str]) -> None:
    table = healthy()
    table[rank, column] ^= 1
    violations = CopyChecker(WATCHED).find_unequal(table)
    assert {violation.check for violation in violations} == checks
    assert {violation.tensor for violation in violations} == {WATCHED[rank][column].name}
    assert all(rank in violation.ranks or f"rank {rank}" in violation.text for violation in violations)


@pytest.mark.parametrize(
    ("values", "ranks", "reference", "is_decided"),
    [
        ("baaa", (0,), 1, True),
        ("aaba", (2,), 0, True),
        ("baaca", (0, 3), 1, True),
        ("ab", (0, 1), 0, False),
        ("aabb", (0, 1, 2, 3), 0, False),
        ("aabc", (0, 1, 2, 3), 0, False),
    ],
)
def test_more_than_half_of_the_copies_decide(
    values: str, ranks: tuple[int, ...], reference: int, is_decided: bool
) -> None:
    split = find_split(dict(enumerate(values)))
    assert split is not None
    assert (split.ranks, split.reference, split.is_decided) == (ranks, reference, is_decided)
    assert find_split(dict.fromkeys(range(4), "a")) is None


def replicas(dp: int) -> CopyChecker:
    """Copies over dp alone, of a weight and of a setting."""
    copies = (("dp", tuple(range(dp))),)
    return CopyChecker([[Watched("matrix", copies), Watched("lr", copies, "optimizer settings", True)]] * dp)


def differing(dp: int, rank: int, column: int, value: int) -> np.ndarray:
    table = np.array([[1, as_bits(1e-3)]] * dp)
    table[rank, column] = value
    return table


@pytest.mark.parametrize("dp", [3, 4])
@pytest.mark.parametrize("rank", range(4))
def test_of_several_replicas_the_corrupt_one_is_accused(dp: int, rank: int) -> None:
    rank %= dp
    (found,) = replicas(dp).find_unequal(differing(dp, rank, 0, 2))
    assert (found.check, found.ranks, found.accused) == ("data-parallel copies", (rank,), (rank,))
    (found,) = replicas(dp).find_unequal(differing(dp, rank, 1, as_bits(3e-3)))
    assert (found.check, found.accused) == ("optimizer settings", (rank,))
    assert found.text == f"is 0.003 on rank {rank} and 0.001 on rank {int(rank == 0)}"


def test_of_two_replicas_none_is_accused() -> None:
    (found,) = replicas(2).find_unequal(differing(2, 1, 0, 2))
    assert (found.ranks, found.accused) == ((0, 1), ())


@pytest.mark.parametrize("rank", range(8))
def test_copies_along_other_axes_decide_between_two(rank: int) -> None:
    """A norm has two copies along dp and two along tp, four in all: three that agree leave one that is wrong."""
    table = healthy()
    table[rank, 1] ^= 1
    found = CopyChecker(WATCHED).find_unequal(table)
    assert {(each.check, each.accused) for each in found} == {
        ("data-parallel copies", (rank,)),
        ("tensor-parallel copies", (rank,)),
    }


def test_a_value_that_all_ranks_have_computed_accuses_none_if_all_miss_it() -> None:
    alone, *all_of_them = (Violation("gradient norm", "all gradients", (rank,), "") for rank in (2, 0, 1, 2))
    assert [each.accused for each in merge([alone])] == [(2,)]
    (together,) = merge(all_of_them)
    assert (together.ranks, together.accused) == ((0, 1, 2), ())
    each_its_own = merge(Violation("memory", "weight", (rank,), "") for rank in (0, 1))
    assert [each.accused for each in each_its_own] == [(0, 1)]


def test_a_sum_over_ranks_counts_each_shard_once() -> None:
    gradient = f"gradient of {TIED}"
    assert counted_once(WATCHED, SHAPE, 0) == {TIED, "0.norm", "0.matrix", gradient}
    assert counted_once(WATCHED, SHAPE, 1) == {TIED, "0.matrix", gradient}
    assert [counted_once(WATCHED, SHAPE, rank) for rank in (4, 5)] == [{"1.norm", "1.matrix"}, {"1.matrix"}]


def test_ranks_are_named_with_their_place() -> None:
    for places in (Places.of_topology(SHAPE, 3), places_of(3, Places.of_topology(SHAPE, 3).members)):
        assert places.topology == SHAPE
        assert places.describe([3]) == "rank 3 (dp1 pp0 tp1)"
        assert places.describe([4, 5, 6, 7]) == "ranks 4-7 (pp1)"


def test_ranks_that_are_numbered_otherwise_still_have_a_place() -> None:
    members = [{"tp": (0, 2), "dp": (0, 1)}, {"tp": (1, 3), "dp": (0, 1)}]
    members += [{"tp": (0, 2), "dp": (2, 3)}, {"tp": (1, 3), "dp": (2, 3)}]
    places = places_of(0, members)
    assert places.topology is None
    assert places.describe([1]) == "rank 1 (dp1 pp0 tp0)"
    assert places.describe([1, 3]) == "ranks 1,3"


def test_causes_come_before_effects() -> None:
    ordered = ["optimizer groups", "clipping", "tied gradients", "tied copies", "masters"]
    mixed = [ordered[number] for number in (3, 2, 1, 4, 0)]
    assert [each.check for each in by_cause([Violation(check, "x", (0,), "") for check in mixed])] == ordered
