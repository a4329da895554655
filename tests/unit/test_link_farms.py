"""Files in a folder where colleagues may write: their links lead no writer of ours astray, and they may write too."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bigsci_launch.launch.job import keep_watch
from bigsci_launch.nodes.memory import add_nodes, make_entry, read_nodes
from bigsci_launch.runs.layout import write_json

from .house.conftest import Program, standalone
from .other_users import ALICE, AS_ROOT, MALLORY, acting_as, make_shared

Write = Callable[[Path], object]
SECRET = "export MYTOKEN=abc\n"


def bad_node(_: Program) -> Write:
    return lambda path: add_nodes(path, [make_entry(f"n{os.geteuid()}", "ecc", "uncorrectable", cluster=None)])


def record_of_rank(program: Program) -> Write:
    write = program("rank_process").write_record
    return lambda path: write(path, {"schema_version": 1})


WRITERS = {
    "nodes/memory": bad_node,
    "rank_process": record_of_rank,
    "layout": lambda _: lambda path: write_json(path, {}),
}


@pytest.fixture
def write(request: pytest.FixtureRequest) -> Iterator[Write]:
    """What one of our programs does with a path."""
    with standalone() as program:
        yield request.param(program)


@AS_ROOT
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS, indirect=True)
def test_links_at_every_name_that_can_be_guessed_change_nothing(tmp_path: Path, write: Write) -> None:
    shared = make_shared(tmp_path / "shared")
    private = tmp_path / "private.rc"
    private.write_text(SECRET)
    private.chmod(0o600)
    os.chown(private, ALICE, ALICE)
    with acting_as(MALLORY):
        for pid in range(os.getpid() - 50, os.getpid() + 50):
            (shared / f".nodes.json.{pid}").symlink_to(private)
            (shared / f"nodes.json.{pid}").symlink_to(private)
    with acting_as(ALICE):
        write(shared / "nodes.json")
    assert (private.read_text(), stat.S_IMODE(private.stat().st_mode)) == (SECRET, 0o600)
    assert isinstance(json.loads((shared / "nodes.json").read_text()), dict)
    assert stat.S_IMODE((shared / "nodes.json").stat().st_mode) == 0o644


@AS_ROOT
@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
@pytest.mark.parametrize("write", [bad_node], ids=["nodes/memory"], indirect=True)
def test_each_member_of_a_project_may_add_bad_nodes(tmp_path: Path, write: Write, mask: int) -> None:
    shared = make_shared(tmp_path / "shared")
    for user in (ALICE, MALLORY):
        with acting_as(user, mask):
            write(shared / "nodes.json")
    assert sorted(entry.node for entry in read_nodes(shared / "nodes.json")) == [f"n{ALICE}", f"n{MALLORY}"]


@AS_ROOT
@pytest.mark.parametrize("write", [bad_node], ids=["nodes/memory"], indirect=True)
def test_a_lock_that_is_a_link_is_refused(tmp_path: Path, write: Write) -> None:
    shared, target = make_shared(tmp_path / "shared"), tmp_path / "shared" / "target"
    with acting_as(MALLORY):
        (shared / ".nodes.json.lock").symlink_to(target)
    with acting_as(ALICE), pytest.raises(Exception, match="symbolic links"):
        write(shared / "nodes.json")
    assert not target.exists()


def test_the_log_of_a_watcher_that_is_a_link_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again and again, and a log that has grown large is emptied."""
    private, log = tmp_path / "private.rc", tmp_path / "watch.log"
    private.write_text(SECRET)
    log.symlink_to(private)
    monkeypatch.setattr(keep_watch, "LOG_LIMIT", 3)
    keeper = keep_watch.Keeper(log, ["true"], tmp_path)
    with keeper._open_log() as stream:
        stream.write(b"words\n")
    assert private.read_text() == SECRET
    log.unlink()
    for words in (b"old\n", b"new\n"):
        with keeper._open_log() as stream:
            stream.write(words)
    assert log.read_text() == "new\n"
