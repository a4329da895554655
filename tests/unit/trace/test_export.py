"""The trace for Perfetto: calls nest, work that is not waited for has a track of its own, arrows join collectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.trace.export import trace_events, write_trace
from bigsci_launch.trace.last import RankCalls
from tests.support.texts import has_parts

from .test_last import call, rank


def events(*ranks: RankCalls, **wanted: Any) -> list[dict[str, Any]]:
    found = list(trace_events(ranks))
    return [each for each in found if all(each.get(key) == value for key, value in wanted.items())]


def late(entered: float, *facts: Any, **more: Any) -> list[Any]:
    made = call(*facts, **more)
    return [entered, *made[1:]]


def test_a_call_is_a_slice_of_its_thread_and_one_that_has_not_ended_lasts_until_the_ring_was_read() -> None:
    slices = events(rank(2, call("all_reduce", 2.0), late(2.5, "recv", None, number=0, peer=1, tag=8)), ph="X")
    assert [(each["name"], each["ts"], each["dur"], each["pid"], each["tid"]) for each in slices] == [
        ("all_reduce", 0.0, 1e6, 2, 7),
        ("recv (not ended)", 1.5e6, 1.5e6, 2, 7),
    ]
    assert slices[1]["args"] == {"step": 4, "at": "a.py:3 f", "group": "0: 0,1", "peer": 1, "tag": 8}


def test_work_that_is_not_waited_for_does_not_overlap_the_calls_after_it() -> None:
    begun = [*call("isend", None, number=0, peer=1, tag=8)[:-1], True]
    made = events(rank(0, begun, late(1.1, "barrier", 1.2)))
    assert [(each["ph"], each["name"]) for each in made if each["ph"] in "Xbe"] == [
        ("X", "isend begins"),
        ("b", "isend (not waited for)"),
        ("e", "isend (not waited for)"),
        ("X", "barrier"),
    ]
    first, second = (each for each in made if each["ph"] == "X")
    assert first["ts"] + first["dur"] <= second["ts"]
    work, end = (each for each in made if each["ph"] in "be")
    assert work["id2"] == end["id2"] == {"local": "0.0"} and "id" not in work  # else no rank has it
    assert (work["args"]["peer"], work["args"]["tag"]) == (1, 8)


def test_an_arrow_runs_through_a_collective_from_the_first_rank_to_the_last() -> None:
    ranks = [rank(0, late(3.0, "all_reduce")), rank(1, late(1.0, "all_reduce")), rank(2, late(2.0, "all_reduce"))]
    arrows = [each for each in events(*ranks) if each["ph"] in "stf"]
    assert [(each["ph"], each["pid"]) for each in arrows] == [("s", 1), ("t", 2), ("f", 0)]
    assert {each["name"] for each in arrows} == {"group 0: 0,1 number 1"}


def test_each_arrow_has_a_number_of_its_own_because_perfetto_drops_those_with_other_words() -> None:
    ranks = [rank(each, call("all_reduce"), late(3.0, "all_reduce", number=2)) for each in range(2)]
    assert [each["id"] for each in events(*ranks) if each["ph"] in "stf"] == [1, 1, 2, 2]


def test_a_collective_of_one_rank_and_a_group_whose_ranks_are_lost_have_no_arrow() -> None:
    unknown = [rank(each, call("all_reduce", group="?")) for each in range(2)]
    assert not [each for each in events(*unknown) if each["ph"] in "stf"]
    assert not [each for each in events(rank(0, call("all_reduce"))) if each["ph"] in "stf"]


def test_a_rank_without_a_ring_is_not_in_the_file_and_one_without_a_number_has_a_process_of_its_own(
    tmp_path: Path,
) -> None:
    nameless = rank(0, call("barrier"))
    ranks = [rank(0, call("barrier")), RankCalls("77", None, nameless.ring, None), RankCalls("rank 3", 3, None, "gone")]
    done = write_trace(ranks, tmp_path / "trace.json")
    assert (done.num_processes, done.num_calls) == (2, 2)
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in written if each["name"] == "process_name"}
    assert names == {0: "rank 0", 2: "77"}


def test_a_folder_without_rings_is_no_unknown_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(bsl, ["trace", "last", str(tmp_path)])
    assert done.exit_code == 4 and str(tmp_path) in done.output, done.output


def test_a_folder_whose_rings_cannot_be_read_says_why_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "77.ring").write_bytes(b"torn")
    done = CliRunner().invoke(bsl, ["trace", "export", str(tmp_path), "--perfetto", str(tmp_path / "trace.json")])
    assert done.exit_code == 4, done.output
    assert has_parts(done.output, "77: ", "77.ring: ")
    assert not (tmp_path / "trace.json").exists()
