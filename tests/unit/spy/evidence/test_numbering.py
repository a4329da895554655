"""What ranks and processes are called, and why a rank is missing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.numbering import NumberedBy, Numbering, list_processes
from bigsci_launch.spy.evidence.ranks import ELSEWHERE, NOT_FOUND, NOT_IDENTIFIED, NOT_STARTED, Evidence
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.show.document import to_document
from bigsci_launch.spy.show.page import render_page
from bigsci_launch.spy.show.report import to_lines, to_text
from tests.support.texts import has_parts

from ..conftest import rank_of

COUNTED = "order of start"


def evidence_of(ranks: list[dict[str, Any]], topology: str | None = None, **node: Any) -> Evidence:
    document = {"node": "n0", "found_by": "descendants of 7", "ranks": ranks, **node}
    return Bundle({"topology": topology}, (document,)).evidence()


@pytest.fixture
def counted() -> Evidence:
    """Rank 0 serves the store; three others were counted."""
    sources = ["store", COUNTED, COUNTED, COUNTED]
    places = ["load@/src/a.py:3", *["wait@/src/a.py:9"] * 3]
    ranks = [rank_of(rank, places[rank], source=source) for rank, source in enumerate(sources)]
    return evidence_of(ranks, "dp=4")


def test_processes_that_were_only_counted_are_no_ranks(counted: Evidence) -> None:
    assert counted.numbering is Numbering.PARTLY
    assert counted.name(0) == "rank 0 (n0)"
    assert counted.name(2) == "process 102 (n0)"
    assert counted.names([0, 1]) == "rank 0 and process 101"
    assert counted.names([1, 2, 3]) == "processes 101, 102 and 103"
    assert (counted.count([0]), counted.count([1]), counted.count([0, 1])) == ("1 rank", "1 process", "2 processes")
    assert counted.list_names([1, 2]) == "101 and 102"


def test_coordinates_need_numbers(counted: Evidence) -> None:
    assert counted.topology is None
    assert counted.coordinate(1) is None
    assert len(counted.problems) == 1


def test_every_answer_calls_them_processes(counted: Evidence) -> None:
    conclusion = judge(counted)
    document = to_document(counted, conclusion)
    assert [(rank["rank"], rank["pid"], rank["numbered_by"], rank["name"]) for rank in document["ranks"]][:2] == [
        (0, 100, "store", "rank 0"), (1, 101, COUNTED, "process 101"),
    ]  # fmt: skip
    assert document["coverage"]["numbering"] == "partly known"
    assert "3 processes: 101, 102 and 103" in to_text(to_lines(counted, conclusion))
    assert "process 101 · n0" in render_page(counted, conclusion)
    json.dumps(document)


@pytest.mark.parametrize(
    ("source", "numbered_by"),
    [
        (None, NumberedBy.UNKNOWN),
        ("pid file", NumberedBy.PID_FILE),
        ("environment", NumberedBy.ENVIRONMENT),
        ("task id", NumberedBy.TASK),
        (COUNTED, NumberedBy.COUNTED),
        ("a source of later", NumberedBy.UNKNOWN),
    ],
)
def test_bundles_of_earlier_versions(source: str | None, numbered_by: NumberedBy) -> None:
    evidence = evidence_of([rank_of(0, "a", source=source)])
    assert evidence.ranks[0].numbered_by is numbered_by
    assert evidence.name(0) == ("process 100 (n0)" if source == COUNTED else "rank 0 (n0)")


def test_processes_that_were_counted_on_two_nodes_are_all_kept() -> None:
    nodes = tuple(
        {"node": node, "ranks": [rank_of(0, "a", source=COUNTED) | {"pid": pid}]}
        for node, pid in (("n0", 11), ("n1", 12))
    )
    evidence = Bundle({}, nodes).evidence()
    assert [(seen.rank, seen.node, seen.pid) for seen in evidence.ranks] == [(0, "n0", 11), (1, "n1", 12)]


def test_a_rank_that_is_missing_among_counted_ones_has_no_number() -> None:
    evidence = evidence_of([rank_of(rank, "a", source=COUNTED, world_size=3) for rank in range(2)])
    assert "2" not in evidence.name(2)
    assert has_parts(evidence.names([1, 2]), "101", " 1 ")
    assert evidence.ranks[2].unreached == NOT_IDENTIFIED


@pytest.mark.parametrize(
    ("numbers", "more", "node", "why"),
    [
        ((0, 1, 2), {}, {}, NOT_FOUND),
        ((2,), {}, {}, ELSEWHERE),
        ((0, 2), {}, {}, NOT_FOUND),
        ((0, 1, 2), {"age_s": 0.5}, {}, NOT_STARTED),
        ((0, 1, 2), {"age_s": 60.0}, {}, NOT_FOUND),
        ((0, 1, 2), {}, {"others": [{"pid": 5, "comm": "python", "role": "unknown", "why": "?"}]}, NOT_IDENTIFIED),
        ((0, 1, 2), {}, {"others": [{"pid": 5, "comm": "sh", "role": "launcher", "why": "?"}]}, NOT_FOUND),
    ],
)
def test_why_a_rank_is_missing(numbers: tuple[int, ...], more: dict[str, Any], node: dict[str, Any], why: str) -> None:
    ranks = [rank_of(rank, "a", source="environment", world_size=4, **more) for rank in numbers]
    evidence = evidence_of(ranks, **node)
    assert {seen.unreached for seen in evidence.ranks if seen.pid is None} == {why}


def test_a_process_that_nobody_could_identify_is_named() -> None:
    others = [{"pid": 5, "comm": "python", "role": "unknown", "why": "it could not be identified"}]
    evidence = evidence_of([rank_of(0, "a", source="environment")], others=others)
    assert f"process 5: {others[0]['why']}" in to_text(to_lines(evidence, judge(evidence)))


def test_lists_of_processes() -> None:
    assert list_processes([7]) == "7"
    assert list_processes([9, 8, 7]) == "7, 8 and 9"
    assert list_processes([9, 8, 7, 10]) == "7, 8 and 2 more"
    assert list_processes([7, None, None]) == "7 and 2 not found"
