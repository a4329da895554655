"""What people ask of a run, as files that anybody in the group may have put there: read safely, and taken up once."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.runs.control import requests
from bigsci_launch.runs.control.asked import NOTHING_ASKED, Asked, StopWish, Wish, read_asked, write_asked
from bigsci_launch.runs.control.requests import read_request, take_over, take_up, taken_up, waiting, write_request
from bigsci_launch.runs.layout import RunDir, open_run
from bigsci_launch.runs.watching.ledger import make_shared_folder

ME = pwd.getpwuid(os.getuid()).pw_name
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run.json").write_text("{}")
    found = open_run(tmp_path)
    make_shared_folder(found.control_done)
    return found


def test_a_plain_file_asks_with_its_name_and_says_why(run: RunDir) -> None:
    (run.control / "exit").write_text("the loss is\n\x1b[2JNaN\n")
    (found,) = requests.read_waiting(run)
    assert (found.verb, found.who, found.why, found.wrong) == ("exit", ME, "the loss is ?[2JNaN", None)
    assert (found.after_step, found.attempt) == (None, None)


def test_a_request_is_the_same_before_and_after_it_is_taken_up_and_only_one_watcher_gets_it(run: RunDir) -> None:
    path = write_request(run, "save", "before the upgrade", after_step=12, attempt="0003")
    before = read_request(run, path)
    taken = take_up(run, path, "agent")
    assert taken is not None and take_up(run, path, "other") is None
    found = read_request(run, taken)
    assert found.key != before.key and found == replace(before, key=found.key)
    assert (found.verb, found.why, found.after_step, found.attempt) == ("save", "before the upgrade", 12, "0003")
    assert (waiting(run), taken_up(run)) == ([], [taken])
    ours = take_over(taken, "other")
    assert ours is not None and take_over(taken, "third") is None
    assert requests.watcher_of(ours) == "other" and requests.key_of(ours) == requests.key_of(taken)


def test_the_author_is_the_owner_of_the_file_whatever_it_claims(run: RunDir) -> None:
    (run.control / "kill").write_text(json.dumps({"who": "alice", "user": "alice", "why": "I am alice"}))
    (found,) = requests.read_waiting(run)
    assert found.who == ME


@needs_root
def test_members_of_the_group_may_ask_and_others_may_not(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = pwd.getpwnam("nobody")
    path = run.control / "exit"
    path.write_text("please")
    os.chown(path, nobody.pw_uid, -1)
    (refused,) = requests.read_waiting(run)
    assert refused.who == "nobody" and refused.wrong == "nobody is not in the run's group root"
    os.chown(run.path, -1, nobody.pw_gid)
    (accepted,) = requests.read_waiting(run)
    assert (accepted.who, accepted.wrong) == ("nobody", None)
    os.chown(path, 54321, -1)
    (unknown,) = requests.read_waiting(run)
    assert (unknown.who, unknown.wrong) == ("uid 54321", "uid 54321 is not known on this machine")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def dangling(path: Path) -> None:
    path.symlink_to("/nowhere")


def second_name(path: Path) -> None:
    other = path.with_name(".other")
    other.write_text("of somebody else")
    path.hardlink_to(other)


def huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(10 << 30)


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (fifo, "it is not a plain file"),
        (link, "it is a link"),
        (dangling, "it is a link"),
        (second_name, "it has another name elsewhere, so that its owner may not be who put it there"),
        (huge, "it is larger than 64 KiB"),
        (folder, "it is not a plain file"),
    ],
)
@pytest.mark.timeout(10)
def test_what_is_no_plain_file_is_refused_and_consumed(run: RunDir, make: Callable[[Path], None], why: str) -> None:
    make(run.control / "exit")
    (path,) = waiting(run)
    taken = take_up(run, path, "agent")
    assert taken is not None and waiting(run) == []
    found = read_request(run, taken)
    assert (found.verb, found.who, found.wrong) == ("exit", ME, why)


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("stop", b"", "'stop' is no verb: save, exit, restart, dump, kill"),
        ("a b@c\n-1-2", b"", "'a_b_c__1_2' is no verb: save, exit, restart, dump, kill"),
        ("exit", b'{"after_step": "soon"}', "exit after step soon is not possible"),
        ("exit", b'{"after_step": -3}', "exit after step -3 is not possible"),
        ("exit", b'{"after_step": true}', "exit after step True is not possible"),
        ("dump", b'{"after_step": 3}', "dump after step 3 is not possible"),
        ("exit-1-2.json", b'{"after_step": 12', "it is not a JSON document"),
        ("exit", b"[" * 60000, None),
        ("exit", b"{" * 60000, "it is not a JSON document"),
        ("exit", b"\xff\x00\xfe", None),
    ],
)
def test_what_it_says_is_judged(run: RunDir, name: str, content: bytes, wrong: str | None) -> None:
    (run.control / name).write_bytes(content)
    (path,) = waiting(run)
    taken = take_up(run, path, "agent")
    assert taken is not None
    found = read_request(run, taken)
    assert found.wrong == wrong
    assert found.why.isprintable() and len(found.why) <= 500


def test_files_of_editors_ask_nothing(run: RunDir) -> None:
    for name in (".exit.swp", "exit~", "done"):
        (run.control / name).touch()
    assert waiting(run) == []


def test_ranks_are_asked_only_in_the_attempt_that_was_meant(run: RunDir) -> None:
    first, second = run.attempt("0001"), run.attempt("0001.r1")
    asked = Asked(Wish("a", 3), StopWish("b", None, "restart", "alice", "new code"))
    write_asked(first, asked)
    assert read_asked(first) == asked
    second.path.mkdir()
    second.asked.write_bytes(first.asked.read_bytes())
    assert read_asked(second) == NOTHING_ASKED, "a requeue copies the files of its attempt"
    for damaged in (b"", b"[]", b"{", b'{"attempt": "0001", "save": 1}', b'{"attempt": "0001", "stop": {}}', b"\xff"):
        first.asked.write_bytes(damaged)
        assert read_asked(first) == NOTHING_ASKED
