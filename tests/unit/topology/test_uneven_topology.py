"""Pipelines of different depths, as the tools that look at ranks know them."""

from __future__ import annotations

import pytest

from bigsci_launch.spy.evidence.groups import group_members, scope_of
from bigsci_launch.topology import Topology, UnevenTopology
from bigsci_launch.topology.naming import name_ranks_and_part

TEXT = "pipelines=0-1x4/2,4-5x3/3,6x4"


@pytest.fixture
def topology() -> Topology:
    return Topology.parse(TEXT)


def test_the_text_is_read_as_it_is_written(topology: Topology) -> None:
    assert isinstance(topology, UnevenTopology) and str(topology) == TEXT
    assert (topology.world_size, topology.is_grid) == (7, False)
    assert [str(topology.coordinate(rank)) for rank in (0, 4, 6)] == ["dp0 pp0 tp0", "dp1 pp1 tp0", "dp2 pp1 tp0"]
    with pytest.raises(ValueError, match="outside"):
        topology.coordinate(7)


def test_stages_have_tensor_parallel_ranks() -> None:
    text = "pipelines=tp=2,0-3x4/4-9x4"
    topology = Topology.parse(text)
    assert (str(topology), topology.world_size, topology.tp, topology.pp, topology.dp) == (text, 10, 2, 3, 2)
    assert str(topology.coordinate(7)) == "dp1 pp1 tp1"
    members = {scope: group_members(scope, 7, 10, topology) for scope in ("tp", "pp", "previous stage", "model")}
    assert members == {"tp": (6, 7), "pp": (5, 7, 9), "previous stage": (5, 7), "model": (4, 5, 6, 7, 8, 9)}
    assert [topology.kind_of(rank) for rank in range(10)] == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]


@pytest.mark.parametrize(
    "text",
    [
        *("pipelines=", "pipelines=0-1x4/1-2x3", "pipelines=0-1x4/3x2", "pipelines=0-1"),
        *("pipelines=tp=2,0-2x4", "pipelines=tp=x,0-1x4"),
    ],
)
def test_what_is_no_such_text(text: str) -> None:
    with pytest.raises(ValueError):
        Topology.parse(text)


def test_ranks_do_the_same_work_at_one_stage_of_pipelines_that_are_alike(topology: Topology) -> None:
    assert [topology.kind_of(rank) for rank in range(7)] == [0, 1, 2, 0, 4, 5, 1]
    fewer = Topology.parse("pipelines=0-1x4/2-3x3")
    assert [fewer.kind_of(rank) for rank in range(4)] == [0, 1, 2, 3]


def test_only_pipelines_are_groups(topology: Topology) -> None:
    members = {scope: group_members(scope, 4, 7, topology) for scope in ("pp", "next stage", "previous stage", "dp")}
    assert members == {"pp": (2, 4, 5), "next stage": (4, 5), "previous stage": (2, 4), "dp": None}
    assert group_members("next stage", 5, 7, topology) is None
    assert group_members("previous stage", 0, 7, topology) is None
    # Those that own the first layer are at no common place.
    assert [scope_of(ranks, 7, topology) for ranks in ((2, 4, 5), (0, 2, 3), range(7))] == ["pp", None, "world"]


def test_parts_have_names(topology: Topology) -> None:
    assert name_ranks_and_part([4], topology) == "rank 4 (dp1 pp1 tp0)"
    assert name_ranks_and_part([2, 4, 5], topology) == "ranks 2,4-5 (dp1)"
