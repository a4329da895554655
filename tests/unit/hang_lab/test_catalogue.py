"""The catalogue is complete, consistent, and matches the programs that it names."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from bigsci_launch.errors import LabError
from bigsci_launch.hang_lab.catalogue import (
    Reproduction,
    all_others,
    both_across,
    both_partners,
    class_order,
    shape_topology,
)
from bigsci_launch.hang_lab.needs import CHECKS
from bigsci_launch.hang_lab.programs import lab_program
from bigsci_launch.hang_lab.zoo import NOT_REPRODUCED, REPRODUCTIONS, find_reproduction, find_reproductions
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology import Topology

# The classes on which the taxonomy was measured.
MEASURED = {
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 17, 18, 30, 31, 32, 33, 34, 35, 36, 38, 39, 40, 41, 42, 43, 44, 45),
    *(47, 48, 55, 60, 61, 62, 64, 70, 75, 80, 100, 101, 102),
}


def test_every_class_is_reproduced_or_says_why_not() -> None:
    reproduced = {one.hang_class for one in REPRODUCTIONS}
    absent = {one.hang_class for one in NOT_REPRODUCED}
    assert not reproduced & absent
    assert reproduced | absent == set(HangClass)
    assert all(one.reason for one in NOT_REPRODUCED)


def test_the_measured_classes_are_reproduced() -> None:
    assert len(MEASURED) == 43
    assert {f"H{number:02d}" for number in MEASURED} <= {str(one.hang_class) for one in REPRODUCTIONS}


def test_names_are_unique_and_begin_with_their_class() -> None:
    assert max(Counter(one.name for one in REPRODUCTIONS).values()) == 1
    assert all(one.name.split("-")[0] == str(one.hang_class) for one in REPRODUCTIONS)


@pytest.mark.parametrize("program", sorted({one.program for one in REPRODUCTIONS}))
def test_recipes_are_those_of_the_program(program: str) -> None:
    """Every recipe that the catalogue names exists, and every recipe is in the catalogue."""
    tree = ast.parse(lab_program(program).read_text())
    table = next(node for node in tree.body if isinstance(node, ast.AnnAssign) and "RECIPES" in ast.dump(node.target))
    assert isinstance(table.value, ast.Dict)
    offered = {key.value for key in table.value.keys if isinstance(key, ast.Constant)}
    assert offered == {one.recipe for one in REPRODUCTIONS if one.program == program}


@pytest.mark.parametrize("reproduction", REPRODUCTIONS, ids=lambda one: one.name)
def test_an_entry_makes_sense(reproduction: Reproduction) -> None:
    assert set(reproduction.needs) <= CHECKS.keys()
    for num_ranks in (4, 8, 16):
        topology = reproduction.topology(num_ranks)
        assert topology.world_size == num_ranks
        for culprit in range(num_ranks):
            assert reproduction.suspects(culprit, topology) <= set(range(num_ranks))
            assert not reproduction.must_accuse or reproduction.suspects(culprit, topology)
    assert reproduction.is_hang or not reproduction.must_accuse or State.CRASHED in reproduction.states


def test_those_that_are_no_hang_are_there() -> None:
    harmless = {one.name for one in REPRODUCTIONS if not one.is_hang}
    assert {"H04", "H05", "H07-single", "H11", "H64", "H70", "H100", "H101", "H102"} <= harmless


def test_who_is_accused() -> None:
    topology = Topology(tp=2, pp=2, dp=2)
    assert both_across(1, topology) == {1, 2}
    assert both_across(7, topology) == {4, 7}
    assert both_partners(4, topology) == {4, 6}
    assert all_others(0, Topology(tp=2, pp=1, dp=2)) == {1, 2, 3}


def test_shapes() -> None:
    assert shape_topology("default", 4) == Topology(tp=2, pp=1, dp=2)
    assert shape_topology("default", 8) == Topology(tp=2, pp=2, dp=2)
    assert shape_topology("stages", 4) == Topology(tp=1, pp=2, dp=2)
    assert shape_topology("data", 6) == Topology(tp=1, pp=1, dp=6)


def test_a_class_stands_for_all_its_reproductions() -> None:
    assert [one.name for one in find_reproductions(["H36"])] == ["H36-stopped", "H36-lock"]
    assert find_reproduction("H36").name == "H36-stopped"
    assert find_reproduction("H07").name == "H07"


@pytest.mark.parametrize(("name", "words"), [("H73", "H73"), ("H1000", "'H1000'")])
def test_what_is_not_there_is_said(name: str, words: str) -> None:
    with pytest.raises(LabError, match=words):
        find_reproduction(name)


def test_too_few_or_odd_ranks_are_refused() -> None:
    for num_ranks in (2, 5):
        with pytest.raises(LabError, match="at least 4"):
            find_reproduction("H01").topology(num_ranks)


def test_classes_sort_by_number() -> None:
    assert sorted(["H100", "H36-stopped", "H07", "H36-lock"], key=class_order) == [
        "H07",
        "H36-lock",
        "H36-stopped",
        "H100",
    ]
