"""What people ask of a run, as files that anybody in the group may have put there: read safely, and taken up once."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.runs.control import requests
from bigsci_launch.runs.control.request import WITH_STEP, Request, put_request, read_requests
from bigsci_launch.runs.control.requests import (
    forget,
    make_control,
    read_waiting,
    take_over,
    take_up,
    taken_up,
    waiting,
    write_request,
)
from bigsci_launch.runs.layout import RunDir, open_run
from tests.support.texts import CheckText, has_parts

ME = pwd.getpwuid(os.getuid()).pw_name
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run.json").write_text("{}")
    found = open_run(tmp_path)
    make_control(found)
    return found


def test_a_plain_file_asks_with_its_name_and_says_why(run: RunDir) -> None:
    (run.control / "exit").write_text("the loss is\n\x1b[2JNaN\n")
    (found,) = read_waiting(run)
    assert (found.verb, found.who, found.why, found.wrong) == ("exit", ME, "the loss is ?[2JNaN", None)
    assert (found.after_step, found.attempt) == (None, None)


def test_a_request_is_the_same_before_and_after_it_is_taken_up_and_only_one_watcher_gets_it(run: RunDir) -> None:
    name = write_request(run, "save", "before the upgrade", after_step=12, attempt="0003")
    (before,) = read_waiting(run)
    taken = take_up(run, name, "agent")
    assert taken is not None and take_up(run, name, "other") is None
    found = taken.request
    assert found.key != before.key and found == replace(before, key=found.key)
    assert (found.verb, found.why, found.after_step, found.attempt) == ("save", "before the upgrade", 12, "0003")
    assert (waiting(run), taken_up(run)) == ([], [taken])
    ours = take_over(run, taken, "other")
    assert ours is not None and take_over(run, taken, "third") is None
    assert (ours.watcher, ours.request, taken_up(run)) == ("other", found, [ours])
    forget(run, ours)
    assert list(run.requests.iterdir()) == []


def test_a_request_that_was_taken_up_and_is_still_there_is_taken_up_once(run: RunDir) -> None:
    """A watcher may die after it has kept a request, and before it has removed it."""
    name = write_request(run, "save", "", after_step=None, attempt="0001")
    (run.control / ".same").hardlink_to(run.control / name)
    first = take_up(run, name, "agent")
    (run.control / ".same").rename(run.control / name)
    assert first is not None and take_up(run, name, "other") is None
    assert (waiting(run), taken_up(run)) == ([], [first])


@needs_root
def test_of_anybody_else_only_so_many_wait_and_are_carried_through(run: RunDir) -> None:
    def ask(number: int, user: int) -> None:
        path = run.control / f"save-{number}-1.json"
        path.write_text("{}")
        os.chown(path, user, -1)

    for number in range(30):
        ask(number, 64_102)
    assert len(waiting(run)) == requests.MOST_OF_ONE
    for name in waiting(run)[:4]:
        assert take_up(run, name, "agent")
    assert len(waiting(run)) == requests.MOST_OF_ONE - 4
    for number in range(30, 60):
        ask(number, os.geteuid())
    assert len(waiting(run)) == requests.MOST_OF_ONE - 4 + 30, "the owner may ask any number"


def test_the_author_is_the_owner_of_the_file_whatever_it_claims(run: RunDir) -> None:
    (run.control / "kill").write_text(json.dumps({"who": "alice", "user": "alice", "why": "I am alice"}))
    (found,) = read_waiting(run)
    assert found.who == ME


@needs_root
def test_members_of_the_group_may_ask_and_others_may_not(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = pwd.getpwnam("nobody")
    path = run.control / "exit"
    path.write_text("please")
    os.chown(path, nobody.pw_uid, -1)
    (refused,) = read_waiting(run)
    assert refused.who == "nobody" and has_parts(refused.wrong or "", "nobody", "root")
    os.chown(run.path, -1, nobody.pw_gid)
    (accepted,) = read_waiting(run)
    assert (accepted.who, accepted.wrong) == ("nobody", None)
    os.chown(path, 54321, -1)
    (unknown,) = read_waiting(run)
    assert unknown.who == "uid 54321" and "uid 54321" in (unknown.wrong or "")


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


@pytest.mark.parametrize("make", [fifo, link, dangling, second_name, huge])
@pytest.mark.timeout(10)
def test_what_is_no_plain_file_is_refused_and_consumed(
    run: RunDir, make: Callable[[Path], None], check_text: CheckText
) -> None:
    make(run.control / "exit")
    (name,) = waiting(run)
    taken = take_up(run, name, "agent")
    assert taken is not None and waiting(run) == [] and taken_up(run) == [taken]
    found = taken.request
    assert (found.verb, found.who, found.why) == ("exit", ME, "")
    check_text(str(found.wrong))


REFUSED = [
    *(("stop", b""), ("a b@c\n-1-2", b""), ("exit", b'{"after_step": "soon"}'), ("exit", b'{"after_step": -3}')),
    *(("exit", b'{"after_step": true}'), ("dump", b'{"after_step": 3}'), ("exit", b'{"after_step": 1e999}')),
    *(("exit", b'{"after_step": %d}' % 10**30), ("exit", b'{"attempt": "../../0001"}'), ("exit", b"{" * 60000)),
    ("exit-1-2.json", b'{"after_step": 12'),
]
TAKEN_AS_WORDS = [("exit", b"[" * 60000), ("exit", b"\xff\x00\xfe")]


@pytest.mark.parametrize(("name", "content"), [*REFUSED, *TAKEN_AS_WORDS], ids=map(str, range(13)))
def test_what_it_says_is_judged(run: RunDir, name: str, content: bytes, check_text: CheckText) -> None:
    (run.control / name).write_bytes(content)
    (asking,) = waiting(run)
    taken = take_up(run, asking, "agent")
    assert taken is not None and taken_up(run) == [taken]
    found = taken.request
    assert bool(found.wrong) is ((name, content) in REFUSED)
    assert found.why.isprintable() and len(found.why) <= 500 and (found.wrong is None or found.why == "")
    check_text(f"{name} {content[:30]!r}: {found.wrong}".replace("\n", " "))


def test_files_of_editors_and_folders_ask_nothing(run: RunDir) -> None:
    for name in (".exit.swp", "exit~"):
        (run.control / name).touch()
    (run.control / "kill").mkdir()
    assert waiting(run) == []


def test_only_who_asked_may_remove_a_request_and_the_owner_keeps_those_that_are_taken_up(run: RunDir) -> None:
    write_request(run, "save", "", after_step=None, attempt="0001")
    take_up(run, *waiting(run), "agent")
    modes = {
        place.name: stat.S_IMODE(place.stat().st_mode) & 0o1777 for place in (run.control, run.watch, run.requests)
    }
    assert modes == {"control": 0o1775, "watch": 0o755, "requests": 0o755}
    assert [stat.S_IMODE(kept.stat().st_mode) for kept in run.requests.iterdir()] == [0o644]


def test_what_only_its_owner_may_read_is_not_made_known(run: RunDir) -> None:
    """Where a folder is shared, somebody else can move it to where it is taken for a reason."""
    (run.control / "exit").write_text("TOKEN=abc")
    (run.control / "exit").chmod(0o600)
    (found,) = read_waiting(run)
    assert (found.verb, found.why, found.wrong) == ("exit", "", None)


@pytest.mark.parametrize("moment", [-(10**9), 10**11, 2**33])
def test_a_time_that_cannot_be_is_no_way_out(run: RunDir, moment: int) -> None:
    (run.control / "exit").write_text("please")
    os.utime(run.control / "exit", (moment, moment))
    taken = take_up(run, *waiting(run), "agent")
    assert taken is not None and taken_up(run) == [taken] and waiting(run) == []
    assert requests.moment_of(taken.request.key) is not None


def test_processes_are_asked_only_in_the_attempt_that_was_meant(run: RunDir) -> None:
    first, second = run.attempt("0001"), run.attempt("0001.r1")
    asked = Request("exit-b", "exit", "alice", "new code", 3, "0001")
    put_request(first, asked)
    assert read_requests(first, WITH_STEP) == [asked] and read_requests(first, ["save"]) == []
    shutil.copytree(first.requests, second.requests)
    (found,) = read_requests(second, WITH_STEP)
    assert found.wrong, "a requeue copies the files of its attempt"


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"[]", b"{", b"\xff", b'{"attempt": "0001"}', b"[" * 70000),
        *(b'{"key": "exit-b", "verb": "exit", "who": 1, "why": "", "attempt": "0001"}',),
        *(b'{"key": "exit-b", "verb": "save", "who": "", "why": "", "attempt": "0001"}',),
        *(b'{"key": "exit-b", "verb": "exit", "who": "", "why": "", "attempt": "0001", "after_step": true}',),
    ],
)
def test_what_is_damaged_asks_nothing_of_processes_and_hides_nothing(run: RunDir, damage: bytes) -> None:
    attempt = run.attempt("0001")
    put_request(attempt, Request("save-a", "save", "alice", "", None, "0001"))
    (attempt.requests / "exit-b.json").write_bytes(damage)
    save, damaged = sorted(read_requests(attempt, WITH_STEP), key=lambda request: request.wrong is not None)
    assert (save.key, save.wrong, damaged.key, damaged.verb) == ("save-a", None, "exit-b", "exit") and damaged.wrong


def test_processes_obey_no_pipe_no_link_and_no_file_that_others_may_write(run: RunDir) -> None:
    attempt = run.attempt("0001")
    for name in ("kept", "exit-b"):
        put_request(attempt, Request(name, "exit", "alice", "", None, "0001"))
    (attempt.requests / "exit-b.json").chmod(0o664)
    (attempt.requests / "exit-c.json").symlink_to("kept.json")
    os.mkfifo(attempt.requests / "exit-d.json")
    assert [bool(request.wrong) for request in read_requests(attempt, WITH_STEP)] == [True] * 3
    attempt.requests.chmod(0o775)
    assert read_requests(attempt, WITH_STEP) == []


@pytest.mark.parametrize("name", ["-a1", "_", ".x-", "\x1b[31mdump", "zz" * 30])
def test_an_odd_name_makes_a_key_that_the_ledger_reads_back(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_]{0,19}", requests._verb(name))
