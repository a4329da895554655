from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.show.document import to_document
from bigsci_launch.spy.show.grid import make_text_grid
from bigsci_launch.spy.show.report import to_lines, to_text
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts

from ..conftest import make_evidence, rank_of, recorded_evidence

GOLDEN = Path(__file__).parents[3] / "golden" / "reports"


def report(evidence: Evidence) -> str:
    return to_text(to_lines(evidence, judge(evidence)))


@pytest.mark.parametrize(
    ("name", "topology"), [("deepspeed-skip-5", "tp=2,pp=2,dp=2"), ("split-1", "tp=2,dp=2"), ("stop-1", None)]
)
def test_the_whole_report(check_golden: Callable[[Path, str], None], name: str, topology: str | None) -> None:
    check_golden(GOLDEN / f"spy-{name}.txt", report(recorded_evidence(name, topology)) + "\n")


def test_384_ranks_in_384_places_on_unreadable_and_silent_nodes_fit_on_a_screen() -> None:
    deep = " < ".join(f"function_with_a_long_name_{depth}@/src/deep.py:{depth}" for depth in range(1, 30))
    ranks = [rank_of(rank, f"work@/src/p.py:{rank} < {deep}" if rank % 3 else None) for rank in range(360)]
    silent = [{"node": f"n{node}", "why": "no answer in 40 s"} for node in (45, 46, 47)]
    evidence = make_evidence(ranks, "tp=4,pp=12,dp=8", ranks_per_node=8, world_size=384, nodes_silent=silent)
    conclusion = judge(evidence)
    for width in (None, 80):
        lines = to_lines(evidence, conclusion, width)
        assert len(lines) <= 40
        assert max(len(line.text) for line in lines[1:]) <= (width or 180)
        text = to_text(lines)
        assert "more classes" in text
        assert has_parts(text, "node n45", silent[0]["why"], "ranks 360-383")


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "cause", "has_coordinates"),
    [
        (4, 12, 8, "loader", True),
        (4, 12, 8, "loader", False),
        (4, 12, 8, "skip", True),
        (8, 16, 32, "loader", True),
        (8, 16, 32, "skip", False),
        pytest.param(8, 16, 256, "loader", True, marks=pytest.mark.long),
    ],
)
def test_the_report_stays_readable_at_any_size(
    synthetic: ModuleType, tp: int, pp: int, dp: int, cause: str, has_coordinates: bool
) -> None:
    topology = Topology(tp=tp, pp=pp, dp=dp)
    bundle = synthetic.SyntheticJob(topology, culprit=topology.world_size // 2 + 9, cause=cause).bundle()
    collection = {**bundle.collection, "topology": str(topology) if has_coordinates else None}
    evidence = Bundle(collection, bundle.nodes).evidence()
    lines = to_lines(evidence, conclusion := judge(evidence), 80)
    texts = [line.text for line in lines]
    assert len(texts) <= 40
    assert max(map(len, texts)) <= 80
    assert conclusion.claim.startswith(texts[0].removesuffix(" ..."))
    # Every class has its line, and its letter is in the grid.
    letters = "ABCDE" if cause == "loader" else "ABCD"
    assert [text[0] for text in texts if re.match(r"[A-Z*] \d+ ranks?: ", text)] == list(letters)
    grid = [line.text for line in lines if line.role == "grid"]
    assert 6 <= len(grid) <= 16
    assert set("".join(grid)) >= set("AB!" if cause == "loader" else "ABCD")


def test_the_grid_shows_who_stands_where() -> None:
    lines = to_lines(evidence := recorded_evidence("deepspeed-skip-5", "tp=2,pp=2,dp=2"), judge(evidence), 80)
    assert [line.text for line in lines if line.role == "grid"] == ["  pp0  BC AA", "  pp1  D! AA"]


def test_a_letter_for_many_ranks_is_that_of_the_most_unusual() -> None:
    marks = dict.fromkeys(range(4 * 64), "A") | {5: "B", 70: "!", 71: "?", 200: "x", 255: "*"}
    topology = Topology(tp=4, pp=2, dp=32)
    assert [row for _, row in make_text_grid(topology, marks, columns=40, max_rows=16).rows] == [
        "ABAAAAAAAAAAAAAAA!AAAAAAAAAAAAAA",
        "AAAAAAAAAAAAAAAAAAxAAAAAAAAAAAA*",
    ]
    assert make_text_grid(topology, marks, columns=10, max_rows=1).rows == (("pp0-1", "BAAA!AA*"),)
    assert [name for name, _ in make_text_grid(None, marks, columns=40, max_rows=4).rows] == ["0", "64", "128", "192"]


def test_a_class_says_ranks_nodes_and_what_they_share() -> None:
    ranks = [rank_of(rank, "a@/src/p.py:1" if rank < 4 else "b@/src/p.py:2") for rank in range(8)]
    text = report(make_evidence(ranks, "tp=2,pp=2,dp=2"))
    assert "A 4 ranks: 0-3  n[0-1]  pp0" in text
    assert "B 4 ranks: 4-7  n[2-3]  pp1" in text


def test_the_suspects_class_is_shown_even_when_it_is_the_smallest() -> None:
    peers = [rank_of(rank, f"wait@/src/p.py:{rank // 10}", wchan="x") for rank in range(100)]
    ranks = [*peers[:99], rank_of(99, "load@/src/q.py:1", state="T")]
    world = "all_reduce@c10d:1 < wait@/src/p.py:"
    ranks[:99] = [rank_of(rank, f"{world}{rank // 10}") for rank in range(99)]
    assert "1 rank: 99" in report(make_evidence(ranks))


def test_the_document_has_the_keys_that_were_promised() -> None:
    evidence = recorded_evidence("skip-1", "tp=2,dp=2")
    document = to_document(evidence, judge(evidence))
    keys = ["schema_version", "job", "world_size", "coverage", "ranks", "others", "verdict", "classes"]
    assert list(document) == keys
    assert list(document["coverage"]) == [
        "ranks_read", "ranks_unreadable", "nodes_silent", "numbering", "problems", "steps_left_out",
    ]  # fmt: skip
    assert list(document["verdict"]) == [
        "state", "class", "signature", "suspects", "look_first", "sides", "confidence", "claim", "evidence", "missing",
        "next",
    ]  # fmt: skip
    assert document["schema_version"] == 1
    assert document["verdict"]["suspects"] == [
        {
            "rank": 1,
            "node": "n0",
            "pid": evidence.ranks[1].pid,
            "numbered_by": evidence.ranks[1].numbered_by.value,
            "coordinate": {"pp": 0, "tp": 1, "dp": 0},
            "children": [],
            "why": document["verdict"]["suspects"][0]["why"],
        }
    ]
    assert all(list(found) == ["ranks", "nodes", "thread", "frames"] for found in document["classes"])


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_folded_command_can_be_copied_and_run(width: int, tmp_path: Path) -> None:
    """A shell takes the lines as they are on the screen, and passes the words on as they were."""
    words = [
        "srun",
        "--overlap",
        "--jobid=1234",
        "--gres=gpu:0",
        "-N1",
        "-n1",
        "-w",
        "node-0123",
        "sh",
        "-c",
        "a | b c",
    ]
    remark = "which says whether the kernel has killed somebody"
    evidence = make_evidence([rank_of(0, "work@/src/train.py:5")])
    conclusion = replace(judge(evidence), next=(f"{shlex.join(words)}  # {remark}",))
    lines = [line.text for line in to_lines(evidence, conclusion, width)]
    first = next(index for index, line in enumerate(lines) if line.startswith("  next "))
    last = next(index for index, line in enumerate(lines) if "somebody" in line)
    shown = [lines[first].replace("next", "    ", 1), *lines[first + 1 : last + 1]]
    assert all(len(line) <= width for line in shown)
    (tmp_path / "srun").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    (tmp_path / "srun").chmod(0o755)
    ran = subprocess.run(
        ["sh", "-c", "\n".join(shown)], env={"PATH": f"{tmp_path}:/bin"}, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == words[1:]


def test_a_rank_that_ended_between_two_looks_is_listed_with_its_last_place() -> None:
    ranks = [rank_of(rank, "wait_for_data@train.py:3") for rank in range(3)]
    ranks[2]["samples"][1] = {"mono": 1.0, "state": "gone", "why": "it has ended"}
    text = report(make_evidence(ranks))
    assert has_parts(text, "\nended: rank 2", "no record shows how", "wait_for_data (train.py:3)"), text
