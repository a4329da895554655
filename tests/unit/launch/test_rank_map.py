from __future__ import annotations

from bigsci_launch.launch.job.rank_map import rank_map, rank_map_lines
from bigsci_launch.topology import Topology


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
