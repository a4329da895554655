"""Which tensors must be equal, and what is reported about those that are not."""

from __future__ import annotations

import numpy as np
import pytest

from bigsci_launch.topology import Topology
from bigsci_launch.train.guards.copies import (
    Column,
    CopyChecker,
    Violation,
    by_cause,
    copy_groups,
    describe,
    find_split,
    holders,
    merge,
)

SHAPE = Topology(tp=2, pp=2, dp=2)
TIED = "tied_modules.embedding.weight"


def columns_of(rank: int) -> list[Column]:
    stage = SHAPE.coordinate(rank).pp_rank
    return [
        Column(TIED, ("dp", "pp")),
        Column(f"{stage}.norm", ("dp", "tp")),
        Column(f"{stage}.matrix", ("dp",)),
        Column(f"gradient of {TIED}", ("pp",), is_gradient=True),
    ]


COLUMNS = [columns_of(rank) for rank in range(8)]


def healthy() -> np.ndarray:
    """A digest per rank and column such that copies are equal and all other digests differ."""
    table = np.empty((8, 4), np.int64)
    for rank in range(8):
        at = SHAPE.coordinate(rank)
        table[rank, :3] = [at.tp_rank, 100 + at.pp_rank, 200 + 10 * at.pp_rank + at.tp_rank]
        table[rank, 3] = 300 + 10 * at.tp_rank + at.dp_rank
    return table


def test_copies_that_are_equal_give_nothing() -> None:
    assert CopyChecker(COLUMNS, SHAPE).find_unequal(healthy()) == []


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
    violations = CopyChecker(COLUMNS, SHAPE).find_unequal(table)
    assert {violation.check for violation in violations} == checks
    assert {violation.tensor for violation in violations} == {COLUMNS[rank][column].name}
    assert all(rank in violation.ranks or f"rank {rank}" in violation.text for violation in violations)


def test_groups_are_as_many_as_copies() -> None:
    """Each tied weight of 8 has dp and pp partners: 4 + 4 groups; norms 4 dp + 4 tp; matrices 4; gradients 4."""
    groups = copy_groups(COLUMNS, SHAPE)
    assert len(groups) == 24
    assert {len(places) for places in groups.values()} == {2}


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


@pytest.mark.parametrize("rank", range(4))
def test_of_four_replicas_the_corrupt_one_is_accused(rank: int) -> None:
    shape = Topology(dp=4)
    table = np.ones((4, 1), np.int64)
    table[rank, 0] = 2
    (found,) = CopyChecker([[Column("matrix", ("dp",))]] * 4, shape).find_unequal(table)
    assert (found.ranks, found.accused) == ((rank,), (rank,))


def test_of_two_replicas_none_is_accused() -> None:
    (found,) = CopyChecker([[Column("matrix", ("dp",))]] * 2, Topology(dp=2)).find_unequal(np.array([[1], [2]]))
    assert (found.ranks, found.accused) == ((0, 1), ())


@pytest.mark.parametrize("rank", range(8))
def test_copies_along_other_axes_decide_between_two(rank: int) -> None:
    """A norm has two copies along dp and two along tp, four in all: three that agree leave one that is wrong."""
    table = healthy()
    table[rank, 1] ^= 1
    found = CopyChecker(COLUMNS, SHAPE).find_unequal(table)
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


def test_the_first_stage_holds_a_tied_tensor() -> None:
    assert holders(COLUMNS, SHAPE) == {
        TIED: 0, "0.norm": 0, "0.matrix": 0, "1.norm": 1, "1.matrix": 1, f"gradient of {TIED}": 0,
    }  # fmt: skip


def test_a_violation_names_ranks_and_their_place() -> None:
    one, stage = Violation("load", "1.norm", (3,), "is lost"), Violation("load", "1.norm", (4, 5, 6, 7), "is lost")
    assert describe(one, SHAPE) == "load: 1.norm on rank 3 (dp1 pp0 tp1): is lost"
    assert describe(stage, SHAPE) == "load: 1.norm on ranks 4-7 (pp1): is lost"


def test_causes_come_before_effects() -> None:
    ordered = ["optimizer groups", "clipping", "tied gradients", "tied copies", "masters"]
    mixed = [ordered[number] for number in (3, 2, 1, 4, 0)]
    assert [each.check for each in by_cause([Violation(check, "x", (0,), "") for check in mixed])] == ordered
