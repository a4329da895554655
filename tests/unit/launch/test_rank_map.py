from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.launch.rank_map import compress_coordinates, rank_map, rank_map_lines
from bigsci_launch.topology import Coordinate, Topology


def test_bloom_fits_on_one_line_per_node() -> None:
    lines = rank_map_lines(Topology(tp=4, pp=12, dp=8), 8)
    assert len(lines) == 48
    assert lines[0] == "node  0  ranks 0-7      dp0-1 pp0 tp0-3"
    assert lines[47] == "node 47  ranks 376-383  dp6-7 pp11 tp0-3"


def test_a_node_with_every_coordinate() -> None:
    [entry] = rank_map(Topology(tp=2, pp=2, dp=2), 8)
    assert (entry.ranks, entry.coordinates) == ("0-7", "dp0-1 pp0-1 tp0-1")


def test_what_is_no_box_becomes_several() -> None:
    entries = rank_map(Topology(tp=4, pp=1, dp=3), 6)
    assert [entry.coordinates for entry in entries] == ["dp0 pp0 tp0-3; dp1 pp0 tp0-1", "dp1 pp0 tp2-3; dp2 pp0 tp0-3"]


def expand(text: str) -> list[tuple[int, int, int]]:
    found = []
    for box in text.split("; "):
        axes = []
        for word in box.split():
            spans = [part.split("-") for part in word[2:].split(",")]
            axes.append([n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)])
        found += [(dp, pp, tp) for dp in axes[0] for pp in axes[1] for tp in axes[2]]
    return found


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_compression_names_every_coordinate_once(coordinates: set[tuple[int, int, int]]) -> None:
    text = compress_coordinates(Coordinate(*each) for each in coordinates)
    assert sorted(expand(text)) == sorted(coordinates)
