"""The memory of bad nodes: two writers, damaged files, expiry."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.errors import RunDirError
from bigsci_launch.nodes.memory import BadNode, add_nodes, forgive_nodes, left_out, make_entry, read_nodes
from tests.support.texts import CheckText, has_parts

NOW = 1_795_400_000.0
ENTRY = BadNode("jean", "n1", "ecc", "uncorrectable", NOW, NOW + 60, "demo", "0001", 3, "alice")


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "nodes.json"


def test_a_new_finding_replaces_the_old_one_of_its_reason(memory: Path) -> None:
    add_nodes(memory, [ENTRY, replace(ENTRY, reason="lost")])
    again = replace(ENTRY, since=NOW + 5, expires=NOW + 65)
    add_nodes(memory, [again])
    assert read_nodes(memory) == [replace(ENTRY, reason="lost"), again]


@pytest.mark.parametrize(
    ("cluster", "asked", "age_s", "is_out"),
    [
        ("jean", "jean", 59, True),
        ("jean", "jean", 61, False),
        ("jean", "lumi", 1, False),
        (None, "lumi", 1, True),
        ("jean", None, 1, True),
    ],
)
def test_who_is_left_out(cluster: str | None, asked: str | None, age_s: float, is_out: bool) -> None:
    entry = replace(ENTRY, cluster=cluster)
    assert bool(left_out([entry], cluster=asked, now=NOW + age_s)) is is_out


@pytest.mark.parametrize("name", ["", "n1\nn2", "n1 n2", "-w", "n[1-4]"])
def test_what_is_no_name_of_a_node_does_not_get_into_the_memory(memory: Path, name: str) -> None:
    with pytest.raises(RunDirError):
        add_nodes(memory, [make_entry(name, "lost", "silent", cluster=None)])
    assert not memory.exists()


def test_by_hand_lasts_until_it_is_forgiven_unless_days_are_given() -> None:
    assert make_entry("n1", "by_hand", "hot", cluster=None).expires is None
    entry = make_entry("n1", "by_hand", "hot", cluster=None, days=0.5)
    assert entry.expires == pytest.approx(time.time() + 43200, abs=5)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"schema_version": 1}', '{"schema_version": 1, "nodes": [{"node": "n1"}]}',
     '{"schema_version": 1, "nodes": [{"cluster": "a", "node": "n1", "reason": "x", "evidence": "", "since": "today", '
     '"expires": null}]}', '{"schema_version": 2, "nodes": []}', "[" * 100_000, '{"schema_version": 1e999}'],
)  # fmt: skip
def test_a_memory_that_cannot_be_read_is_an_error_that_names_it_and_stays_as_it_is(memory: Path, text: str) -> None:
    memory.write_text(text)
    for attempt in (
        lambda: read_nodes(memory),
        lambda: add_nodes(memory, [ENTRY]),
        lambda: forgive_nodes(memory, None, cluster=None),
    ):
        with pytest.raises(RunDirError, match=r"nodes\.json"):
            attempt()
    assert memory.read_text() == text


def test_a_link_to_nowhere_does_not_mean_that_all_nodes_are_good(memory: Path) -> None:
    memory.symlink_to("/nowhere/nodes.json")
    with pytest.raises(RunDirError, match="symbolic link"):
        read_nodes(memory)


def add_one(memory: Path, number: int) -> None:
    add_nodes(memory, [replace(ENTRY, node=f"n{number}", since=NOW + number)])


def test_writers_at_the_same_time_lose_nothing(memory: Path) -> None:
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(add_one, [memory] * 24, range(24)))
    assert [entry.node for entry in read_nodes(memory)] == [f"n{number}" for number in range(24)]
    assert sorted(path.name for path in memory.parent.iterdir()) == [".nodes.json.lock", "nodes.json"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs on a machine without Slurm."""
    monkeypatch.setenv("BSL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path / "runs"


def call(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(bsl, ["nodes", *words])
    assert done.exit_code == code, done.output
    return done.output


def test_added_listed_and_forgiven_by_hand(runs: Path, check_text: CheckText) -> None:
    texts = [call(), call("add", "n[7-8]", "--reason", "fan is broken")]
    document = json.loads(call("list", "--json"))
    assert [(each["node"], each["reason"], each["expires"]) for each in document["nodes"]] == [
        ("n7", "by_hand", None),
        ("n8", "by_hand", None),
    ]
    assert has_parts(call("list"), "n7", "n8", "fan is broken")
    check_text(*texts, call("forgive", "n7"), call("forgive", "n7", code=2))
    call("forgive", code=2)
    call("add", "n[3", "--reason", "x", code=2)
    assert "n8" in call("forgive", "--all")
    assert call() == texts[0]


def test_a_folder_that_may_not_be_written_is_named(runs: Path) -> None:
    if os.getuid() == 0:
        runs.write_text("not a folder")
    else:
        runs.mkdir(mode=0o500)
    assert f"error: {runs}" in call("add", "n1", "--reason", "x", code=2)
