from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.errors import CollectError, EvidenceError
from bigsci_launch.spy.evidence.bundle import Bundle, read_bundle, write_bundle
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.show.document import to_document
from tests.support.texts import has_parts

from ..conftest import rank_of


@pytest.fixture
def bundle() -> Bundle:
    ranks = [rank_of(rank, "all_reduce@c10d:1 < step@/src/a.py:2") for rank in range(3)]
    ranks.append(rank_of(3, "load@/src/a.py:9", wchan="hrtimer_nanosleep"))
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


@pytest.mark.parametrize(
    ("umask", "folder_mode", "file_mode"), [(0o000, 0o750, 0o640), (0o022, 0o750, 0o640), (0o077, 0o700, 0o600)]
)
def test_only_the_group_may_read_it(
    bundle: Bundle, tmp_path: Path, umask: int, folder_mode: int, file_mode: int
) -> None:
    before = os.umask(umask)
    try:
        for _ in range(2):
            write_bundle(tmp_path / "spy" / "b", bundle, {}, "report")
    finally:
        os.umask(before)
    assert (tmp_path / "spy").stat().st_mode & 0o022 == 0, "others could put a bundle of theirs there"
    found = [tmp_path / "spy" / "b", *(tmp_path / "spy" / "b").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in found if path.is_dir()} == {folder_mode}
    assert {path.stat().st_mode & 0o777 for path in found if path.is_file()} == {file_mode}
    assert len(found) == 3 + 3 + 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"last_sequence": {}}, "group 't'"),
        ({"stream": [7]}, "1 collectives"),
        ({"stream": [-1]}, "its call"),
        ({"open": [3]}, "its open call"),
        ({"tokens": [["t"]]}, "ValueError"),
        ({"first_record": None}, "TypeError"),
        ({"tokens": [["t", "", 5, {}, []]]}, "damaged"),
    ],
)
def test_a_record_that_refers_to_nothing_is_one_sentence(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    rank = rank_of(0, "all_reduce@c10d:1 < step@/src/a.py:2", calls="t t!")
    rank["samples"][-1]["recorder"].update(change)
    write_bundle(tmp_path / "b", Bundle({"world_size": 1}, ({"node": "n0", "ranks": [rank]},)), {}, "")
    said = CliRunner().invoke(bsl, ["spy", "--bundle", str(tmp_path / "b")])
    assert said.exit_code == EvidenceError.exit_code, said.exception
    assert has_parts(said.output, f"error: {tmp_path / 'b'}: ", words)


def test_any_damage_of_a_bundle_is_one_sentence(tmp_path: Path) -> None:
    rank = rank_of(0, "all_reduce@c10d:1 < step@/src/a.py:2")
    for change in ({"samples": 5}, {"world_size": 10**12}, {"rank": "x"}, {"samples": [{"stack": [7]}]}):
        write_bundle(tmp_path / "b", Bundle({}, ({"node": "n0", "ranks": [{**rank, **change}]},)), {}, "")
        said = CliRunner().invoke(bsl, ["spy", "--bundle", str(tmp_path / "b")])
        assert (said.exit_code, said.output.count("\n")) == (EvidenceError.exit_code, 2), (change, said.exception)
        assert said.output.startswith(f"error: {tmp_path / 'b'}: ")
