from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.errors import CollectError, EvidenceError
from bigsci_launch.spy.evidence.bundle import Bundle, read_bundle, write_bundle
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.show.document import to_document

MakeRank = Callable[..., dict[str, Any]]


@pytest.fixture
def bundle(make_rank: MakeRank) -> Bundle:
    ranks = [make_rank(rank, "all_reduce@c10d:1 < step@/src/a.py:2") for rank in range(3)]
    ranks.append(make_rank(3, "load@/src/a.py:9", wchan="hrtimer_nanosleep"))
    nodes = tuple({"node": f"n{rank['rank']}", "ranks": [rank]} for rank in ranks)
    silent = [{"node": "n4", "why": "no answer"}]
    return Bundle({"job": "12", "topology": "dp=5", "world_size": 5, "nodes_silent": silent}, nodes)


def test_a_stored_bundle_gives_the_same_answer(bundle: Bundle, tmp_path: Path) -> None:
    evidence = bundle.evidence()
    live = to_document(evidence, judge(evidence))
    write_bundle(tmp_path / "b", bundle, live, "report")
    again = read_bundle(tmp_path / "b").evidence()
    assert to_document(again, judge(again)) == live
    assert (tmp_path / "b" / "report.txt").read_text() == "report\n"


def test_a_second_look_into_one_folder_keeps_nothing_of_the_first(bundle: Bundle, tmp_path: Path) -> None:
    """A node that has become silent must not seem to answer with its document from an earlier look."""
    write_bundle(tmp_path / "b", bundle, {}, "")
    write_bundle(tmp_path / "b", Bundle(bundle.collection, bundle.nodes[:2]), {}, "")
    assert [node["node"] for node in read_bundle(tmp_path / "b").nodes] == ["n0", "n1"]


def test_another_topology_may_be_given_later(bundle: Bundle) -> None:
    assert str(bundle.evidence("tp=5").topology) == "tp=5,pp=1,dp=1"


def test_a_folder_without_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="not a bundle"):
        read_bundle(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 99}'])
def test_a_damaged_bundle(tmp_path: Path, text: str) -> None:
    (tmp_path / "collection.json").write_text(text)
    with pytest.raises(EvidenceError, match="collection"):
        read_bundle(tmp_path)


def test_a_place_that_cannot_be_written(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CollectError, match="cannot be stored") as caught:
        write_bundle(tmp_path / "file" / "b", bundle, {}, "")
    assert "--output" in str(caught.value.hint)
