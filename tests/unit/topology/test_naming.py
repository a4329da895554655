"""Ranks and their places in words: short, exact, and in one dialect."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.topology import AXIS_NAMES, Coordinate, Topology, expand_ranks
from bigsci_launch.topology.naming import (
    MAX_LIST,
    agree,
    count_ranks,
    counted,
    name_box,
    name_coordinates,
    name_part,
    name_ranks,
    name_ranks_and_part,
)
from bigsci_launch.topology.parts import Box, find_boxes, part_of, shared_by

CUBE = Topology(tp=2, pp=2, dp=2)
BLOOM = Topology(tp=4, pp=12, dp=8)
small = st.integers(1, 3)
topologies = st.builds(Topology, tp=small, pp=small, dp=small, cp=small, ep=st.integers(1, 2))


def expand(text: str) -> list[tuple[int, int, int]]:
    found = []
    for box in text.split("; "):
        axes = [expand_ranks(word[2:]) for word in box.split()]
        found += [(dp, pp, tp) for dp in axes[0] for pp in axes[1] for tp in axes[2]]
    return found


def ranks_in(box: Box, topology: Topology) -> set[int]:
    coordinates = {rank: topology.coordinate(rank) for rank in range(topology.world_size)}
    return {rank for rank, at in coordinates.items() if all(at[axis] in box[axis] for axis in box)}


def read_box(text: str) -> Box:
    return {word[:2]: expand_ranks(word[2:]) for word in text.split()}


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_compression_names_every_coordinate_once(coordinates: set[tuple[int, int, int]]) -> None:
    text = name_coordinates(Coordinate(each) for each in coordinates)
    assert sorted(expand(text)) == sorted(coordinates)


@given(topologies, st.data())
def test_boxes_hold_every_rank_once(topology: Topology, data: st.DataObject) -> None:
    ranks = data.draw(st.sets(st.integers(0, topology.world_size - 1), min_size=1))
    held = [ranks_in(box, topology) for box in find_boxes(topology.coordinate(rank) for rank in ranks)]
    assert set().union(*held) == ranks and sum(map(len, held)) == len(ranks)


@given(topologies, st.data())
def test_a_part_is_exactly_the_ranks(topology: Topology, data: st.DataObject) -> None:
    """What is named without `in` holds these ranks and no others; what is named with it holds them all."""
    ranks = data.draw(st.sets(st.integers(0, topology.world_size - 1), min_size=1))
    text = name_part(ranks, topology)
    if text.startswith("in "):
        assert ranks < ranks_in(read_box(text[3:]), topology)
        assert part_of(ranks, topology) is None and read_box(text[3:]) == shared_by(ranks, topology)
    elif text or len(ranks) == topology.world_size:
        assert ranks_in(read_box(text), topology) == ranks


@given(topologies, st.data())
def test_every_product_of_indices_is_a_part(topology: Topology, data: st.DataObject) -> None:
    box = {
        axis: tuple(sorted(data.draw(st.sets(st.integers(0, topology[axis] - 1), min_size=1)))) for axis in AXIS_NAMES
    }
    narrow = {axis: indices for axis, indices in box.items() if len(indices) < topology[axis]}
    assert part_of(ranks_in(box, topology), topology) == narrow
    if len(ranks_in(box, topology)) > 1:
        assert name_part(ranks_in(box, topology), topology) == name_box(narrow)


@pytest.mark.parametrize(
    ("topology", "ranks", "text"),
    [
        (CUBE, [5], "rank 5 (dp0 pp1 tp1)"),
        (CUBE, [4, 5, 6, 7], "ranks 4-7 (pp1)"),
        (CUBE, [4, 5], "ranks 4-5 (dp0 pp1)"),
        (CUBE, [1, 3, 5, 7], "ranks 1,3,5,7 (tp1)"),
        (CUBE, [0, 7], "ranks 0,7"),
        (CUBE, range(8), "ranks 0-7"),
        (BLOOM, range(96, 128), "ranks 96-127 (pp3)"),
        (BLOOM, range(97, 128), "ranks 97-127 (in pp3)"),
        (BLOOM, range(0, 383), "ranks 0-382"),
        (BLOOM, range(0, 384, 4), "96 ranks (tp0)"),
        (Topology.parse("tp=2,cp=2,dp=2"), [2, 3], "ranks 2-3 (dp0 cp1)"),
        (Topology(dp=2), [1], "rank 1 (dp1 pp0 tp0)"),
        (None, [1, 2], "ranks 1-2"),
        (CUBE, [7, 8], "ranks 7-8"),
        (CUBE, [], "ranks "),
    ],
)
def test_ranks_with_their_place(topology: Topology | None, ranks: range | list[int], text: str) -> None:
    assert name_ranks_and_part(ranks, topology) == text


def test_a_long_list_is_cut_in_a_sentence() -> None:
    assert (name_ranks([3]), name_ranks(range(1024))) == ("rank 3", "ranks 0-1023")
    words = name_ranks(range(0, 1024, 2))
    assert words.startswith("512 ranks (0,2,4,") and words.endswith(",...)") and len(words) < 80


@given(st.sets(st.integers(0, 100_000), min_size=1))
def test_a_list_of_ranks_stays_short(ranks: set[int]) -> None:
    text = name_ranks(ranks)
    assert len(text) <= MAX_LIST + 20
    assert set(expand_ranks(re.sub(r"^[0-9]+ ranks \((.*),\.\.\.\)$|^ranks? ", r"\1", text))) <= ranks


def test_verbs_agree_with_their_ranks() -> None:
    assert [agree("does not leave", ranks) for ranks in ([0], [0, 1])] == ["does not leave", "do not leave"]
    assert agree("is still in", 2) == "are still in" and agree("has", [3]) == "has"
    assert agree("goes on", 7) == "go on" and agree("was", 0) == "were" and agree("holds its x", 2) == "hold their x"
    assert [counted(count, "waits") for count in (0, 1, 7)] == ["0 ranks wait", "1 rank waits", "7 ranks wait"]
    assert count_ranks({5}) == count_ranks(1) == "1 rank"
