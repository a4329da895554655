"""Rank arithmetic is a bijection, in DeepSpeed's order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.topology import AXES, Coordinate, Topology, compress_ranks, expand_ranks

topologies = st.builds(Topology, tp=st.integers(1, 8), pp=st.integers(1, 12), dp=st.integers(1, 8))


@given(topologies)
def test_rank_and_coordinate_are_inverse(topology: Topology) -> None:
    coordinates = [topology.coordinate(rank) for rank in range(topology.world_size)]
    assert [topology.rank(at) for at in coordinates] == list(range(topology.world_size))
    assert len(set(coordinates)) == topology.world_size


@given(topologies)
def test_groups_of_an_axis_share_out_all_ranks(topology: Topology) -> None:
    for axis in AXES:
        groups = topology.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
        assert {len(group) for group in groups} == {getattr(topology, axis)}


def test_order_is_tensor_then_data_then_pipeline() -> None:
    topology = Topology(tp=2, pp=2, dp=2)
    assert topology.coordinate(5) == Coordinate(dp_rank=0, pp_rank=1, tp_rank=1)
    assert str(topology.coordinate(5)) == "dp0 pp1 tp1"
    assert topology.group("tp", 5) == (4, 5)
    assert topology.group("dp", 5) == (5, 7)
    assert topology.group("pp", 5) == (1, 5)


@given(st.sets(st.integers(0, 400)))
def test_compressed_ranks_read_back(ranks: set[int]) -> None:
    assert expand_ranks(compress_ranks(ranks)) == tuple(sorted(ranks))


@pytest.mark.parametrize("text", ["tp=0", "tp=2,tp=2", "mp=2", "tp", "tp=2;pp=2", ""])
def test_bad_topologies_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Topology.parse(text)


def test_parse_fills_in_missing_axes() -> None:
    assert Topology.parse("pp=4, tp=2") == Topology(tp=2, pp=4, dp=1)
    assert Topology.parse(str(Topology(3, 4, 5))) == Topology(3, 4, 5)
