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
    describe,
    expected_pairs,
    holders,
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


def test_pairs_are_as_many_as_copies() -> None:
    """Each tied weight of 8 has dp and pp partners: 4 + 4 pairs; norms 4 dp + 4 tp; matrices 4; gradients 4."""
    assert len(list(expected_pairs(COLUMNS, SHAPE))) == 24


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
