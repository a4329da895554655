"""Rank arithmetic is a bijection on any number of axes, in Megatron's order; for three axes that is DeepSpeed's."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.topology import AXES, AXIS_NAMES, Coordinate, Topology

three_axes = st.builds(Topology, tp=st.integers(1, 8), pp=st.integers(1, 12), dp=st.integers(1, 8))
small = st.integers(1, 4)
four_axes = st.builds(Topology, tp=small, pp=small, dp=small, cp=st.integers(2, 4))
five_axes = st.builds(Topology, tp=small, pp=small, dp=small, cp=st.integers(2, 3), ep=st.integers(2, 3))
topologies = three_axes | four_axes | five_axes


@given(topologies)
def test_rank_and_coordinate_are_inverse(topology: Topology) -> None:
    coordinates = [topology.coordinate(rank) for rank in range(topology.world_size)]
    assert [topology.rank(at) for at in coordinates] == list(range(topology.world_size))
    assert len(set(coordinates)) == topology.world_size
    assert [Coordinate.at(**at.as_dict()) for at in coordinates] == coordinates
    assert all(0 <= at[axis] < topology[axis] for at in coordinates for axis in AXIS_NAMES)


@given(three_axes)
def test_three_axes_are_numbered_as_deepspeed_numbers_them(topology: Topology) -> None:
    tp, dp = topology.tp, topology.dp
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        assert (at.tp_rank, at.dp_rank, at.pp_rank) == (rank % tp, rank // tp % dp, rank // tp // dp)
        assert str(at) == f"dp{at.dp_rank} pp{at.pp_rank} tp{at.tp_rank}"
        assert list(at.as_dict().items()) == [("pp", at.pp_rank), ("tp", at.tp_rank), ("dp", at.dp_rank)]
    assert str(topology) == f"tp={tp},pp={topology.pp},dp={dp}"
    assert list(topology.as_dict().items()) == [("tp", tp), ("pp", topology.pp), ("dp", dp)]


@given(topologies)
def test_the_numbering_counts_through_the_axes_in_their_order(topology: Topology) -> None:
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        assert rank == sum(at[axis.name] * math.prod(topology.sizes[:number]) for number, axis in enumerate(AXES))


@given(topologies)
def test_groups_of_an_axis_share_out_all_ranks(topology: Topology) -> None:
    for axis in AXIS_NAMES:
        groups = topology.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
        assert {len(group) for group in groups} == {topology[axis]}
        for group in groups:
            others = {
                tuple(topology.coordinate(rank)[other] for other in AXIS_NAMES if other != axis) for rank in group
            }
            assert len(others) == 1 and [topology.coordinate(rank)[axis] for rank in group] == list(range(len(group)))


@given(topologies, st.data())
def test_a_group_over_several_axes_holds_all_that_differ_there_alone(topology: Topology, data: st.DataObject) -> None:
    axes = data.draw(st.sets(st.sampled_from(AXIS_NAMES)))
    rank = data.draw(st.integers(0, topology.world_size - 1))
    kept = [axis for axis in AXIS_NAMES if axis not in axes]
    at = topology.coordinate(rank)
    alike = [r for r in range(topology.world_size) if all(topology.coordinate(r)[axis] == at[axis] for axis in kept)]
    assert topology.group_over(axes, rank) == tuple(alike)


def test_order_is_tensor_then_data_then_pipeline() -> None:
    topology = Topology(tp=2, pp=2, dp=2)
    assert topology.coordinate(5) == Coordinate.at(dp=0, pp=1, tp=1)
    assert str(topology.coordinate(5)) == "dp0 pp1 tp1"
    assert topology.group("tp", 5) == (4, 5)
    assert topology.group("dp", 5) == (5, 7)
    assert topology.group("pp", 5) == (1, 5)
    assert re.findall(r"\b[a-z]p\b", topology.numbering) == ["tp", "dp", "pp"]


def test_context_and_expert_ranks_are_between_tensor_and_data() -> None:
    topology = Topology.parse("tp=2,cp=2,ep=2,pp=2,dp=2")
    assert topology.world_size == 32
    assert str(topology.coordinate(1 + 2 + 8)) == "dp1 pp0 ep0 cp1 tp1"
    assert topology.coordinate(11).as_dict() == {"pp": 0, "tp": 1, "dp": 1, "cp": 1, "ep": 0}
    assert [topology.group(axis, 0)[1] for axis in ("tp", "cp", "ep", "dp", "pp")] == [1, 2, 4, 8, 16]
    assert topology.product.split(" x ") == ["tp 2", "cp 2", "ep 2", "pp 2", "dp 2"]
    assert re.findall(r"\b[a-z]p\b", topology.numbering) == ["tp", "cp", "ep", "dp", "pp"]


@pytest.mark.parametrize(
    ("text", "axis"), [("tp=2,cp=1,dp=4", "cp"), ("ep=1,pp=2", "ep"), ("cp=2,dp=4", "ep"), ("ep=2,dp=4", "cp")]
)
def test_an_axis_of_size_one_is_not_shown(text: str, axis: str) -> None:
    topology = Topology.parse(text)
    assert axis not in str(topology) and axis not in topology.as_dict()
    assert axis not in str(topology.coordinate(1)) and axis not in topology.coordinate(1).as_dict()
    assert topology.coordinate(1)[axis] == 0


@pytest.mark.parametrize("text", ["tp=0", "tp=2,tp=2", "mp=2", "tp", "tp=2;pp=2", "", "cp=2,cp=2", "CP=2"])
def test_bad_topologies_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Topology.parse(text)


@pytest.mark.parametrize("make", [Topology, Coordinate.at, Topology().rank_at, Topology().resized])
def test_an_unknown_axis_is_refused_by_name(make: type[Topology]) -> None:
    with pytest.raises(ValueError, match=r"'sp' .*tp, cp, ep, dp, pp"):
        make(sp=2)


def test_parse_fills_in_missing_axes() -> None:
    assert Topology.parse("pp=4, tp=2") == Topology(tp=2, pp=4, dp=1)
    assert Topology.parse("dp=2,cp=3") == Topology(dp=2, cp=3)


@given(topologies)
def test_texts_and_documents_read_back(topology: Topology) -> None:
    assert Topology.parse(str(topology)) == topology == Topology(**topology.as_dict())
    assert topology.resized(dp=7).resized(dp=topology.dp) == topology
