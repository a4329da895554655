"""What a colleague of the run's group may do to a run, with two real users: ask. Nothing that they write is a path, a
name or a number that the owner's processes act on."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from bigsci_launch.errors import RunDirError
from bigsci_launch.launch.cancel import cancel_run
from bigsci_launch.procfs import start_ticks
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.control.request import WITH_STEP, read_requests
from bigsci_launch.runs.control.requests import make_control, write_request
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.runs.watching.heartbeat import (
    Health,
    own_heartbeat,
    read_all_heartbeats,
    read_heartbeats,
    write_heartbeat,
)
from bigsci_launch.runs.watching.ledger import (
    Act,
    RunFinding,
    claim,
    raise_finding,
    read_acts,
    read_all_findings,
    read_findings,
    record_act,
)
from bigsci_launch.runs.watching.outbox import Notice, queue_notice, read_pending
from bigsci_launch.runs.watching.read import read_watching
from bigsci_launch.scheduler.local import Launcher
from bigsci_launch.watch.act.request_handler import RequestHandler
from tests.support.listening import table
from tests.support.texts import has_parts

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users"),
    pytest.mark.timeout(60),
]
OWNER, COLLEAGUE = pwd.getpwnam("daemon"), pwd.getpwnam("bin")
FINDING = RunFinding("hang", "stall:0001:45", "rank 3 hangs", 1000.0, "0001", step=45)


def run_as(user: pwd.struct_passwd, work: Callable[[], object]) -> str:
    """Do `work` as another user, in a child, and return the error that it ended with; empty if there was none."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        said = ""
        try:
            os.setgroups([COLLEAGUE.pw_gid])  # the run's group
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            os.umask(0o022)
            work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return said


class Shared:
    """A run of `daemon`, in the group of `bin`, whose attempt is a process that sleeps, and a private folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = RunDir(folder / "runs" / "trial")
        self.attempt = self.run.attempt("0001")
        self.keys = folder / "keys"
        self.process = subprocess.Popen(
            [str(self.attempt.path), "60"], executable="/bin/sleep", user=OWNER.pw_uid, group=OWNER.pw_gid, cwd="/"
        )
        assert run_as(OWNER, self._make) == ""

    def _make(self) -> None:
        self.run.path.mkdir(parents=True)
        os.chown(self.run.path, -1, COLLEAGUE.pw_gid)
        self.attempt.make()
        write_json(self.run.record, {"name": "trial"})
        write_job(self.attempt, JobRecord("local", time.time(), launcher=self.launcher(), total_steps=100))
        make_control(self.run)
        self.keys.mkdir(mode=0o700)
        (self.keys / "id_ed25519@cluster").write_text("SECRET")
        (self.keys / "id_ed25519@cluster").chmod(0o600)
        self.sign()

    def launcher(self) -> Launcher:
        return Launcher(self.process.pid, start_ticks(self.process.pid) or 0, socket.gethostname())

    def sign(self) -> None:
        write_heartbeat(
            self.run,
            own_heartbeat("agent", every_s=1, health=Health.HEALTHY, sentence="", attempt="0001", may_act=True),
        )

    def serve(self, rounds: int = 3) -> str:
        """Have the owner's watcher do what is asked; return its error."""

        def work() -> None:
            self.sign()
            clock = iter(range(0, 1000, 5))
            handler = RequestHandler(self.run, "agent", lambda: (None, "not looked"), lambda: next(clock))
            for _ in range(rounds):
                handler.serve(time.time(), 4, 1e6)

        return run_as(OWNER, work)

    def published(self) -> str:
        return "".join(path.read_text() for path in self.run.watch.rglob("*") if path.is_file())


@pytest.fixture
def shared() -> Iterator[Shared]:
    folder = Path(tempfile.mkdtemp(prefix="bsl-strangers-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "runs").mkdir()
    os.chown(folder / "runs", OWNER.pw_uid, COLLEAGUE.pw_gid)
    os.chown(folder, OWNER.pw_uid, -1)
    found = Shared(folder)
    yield found
    found.process.kill()
    found.process.wait()
    shutil.rmtree(folder)


def test_a_colleague_asks_and_the_owner_s_watcher_does_it(shared: Shared) -> None:
    assert run_as(COLLEAGUE, lambda: write_request(shared.run, "exit", "NaN", after_step=None, attempt="0001")) == ""
    assert run_as(COLLEAGUE, lambda: (shared.run.control / "save").write_text("for the night\n")) == ""
    assert shared.serve() == ""
    asked = {(act.what, act.who, act.why, act.state) for act in read_acts(shared.run)}
    assert asked == {("exit", "bin", "NaN", "begun"), ("save", "bin", "for the night", "begun")}
    passed_on = {(request.verb, request.who, request.wrong) for request in read_requests(shared.attempt, WITH_STEP)}
    assert passed_on == {("exit", "bin", None), ("save", "bin", None)} and list(shared.run.control.iterdir()) == []


@pytest.mark.parametrize("umask", [0o022, 0o002])
def test_links_that_a_colleague_puts_into_control_lead_nowhere(shared: Shared, umask: int) -> None:
    """A run directory that others may write is no better guarded than this: they may replace what is in it."""
    keys = {path.name: path.read_text() for path in shared.keys.iterdir()}

    def attack() -> None:
        (shared.run.control / "done").symlink_to(shared.keys)
        (shared.run.control / "exit").symlink_to(shared.keys / "id_ed25519@cluster")
        os.mkfifo(shared.run.control / "kill")
        (shared.run.control / "dump").write_text("hi")
        if umask == 0o002:
            shared.run.watch.rename(shared.run.path / "w")
            shared.run.watch.symlink_to(shared.keys)

    if umask == 0o002:
        shared.run.path.chmod(0o2775)
    assert run_as(COLLEAGUE, attack) == ""
    said = shared.serve()
    assert {path.name: path.read_text() for path in shared.keys.iterdir()} == keys
    assert (said != "") == (umask == 0o002)
    if umask == 0o022:
        assert "SECRET" not in shared.published() and list(shared.run.control.iterdir()) == []
        refused = {act.what: act.words for act in read_acts(shared.run) if act.state == "refused"}
        assert "a link" in refused["exit"] and "plain file" in refused["kill"]


def test_control_itself_as_a_link_is_not_followed(shared: Shared) -> None:
    shared.run.path.chmod(0o2775)

    def attack() -> None:
        shared.run.control.rename(shared.run.path / "c")
        shared.run.control.symlink_to(shared.keys)

    assert run_as(COLLEAGUE, attack) == "" and shared.serve() == ""
    assert [path.name for path in shared.keys.iterdir()] == ["id_ed25519@cluster"]
    assert read_acts(shared.run) == []


@pytest.mark.slow
def test_a_colleague_cannot_write_the_ledger_nor_claim_nor_act(shared: Shared) -> None:
    run = shared.run
    act = Act("kill-1-1", "kill", "bin", "", "done", attempt="0001")
    notice = Notice("k", "hang", "hangs", "trial", "bin", time.time())
    for work in (
        lambda: record_act(run, act),
        lambda: claim(run, "end_ranks:0001:1", "bin"),
        lambda: queue_notice(run, notice, ["command"]),
    ):
        assert "only daemon" in run_as(COLLEAGUE, work)
    for path in (run.acts, run.findings, run.watch / "claims" / "x", run.requests / "kill-1-1.1"):
        assert (
            "PermissionError" in run_as(COLLEAGUE, lambda path=path: path.open("a").close()) or not path.parent.exists()
        )
    assert (read_acts(run), read_pending(run)) == ([], [])


def test_a_colleague_s_watcher_is_heard_under_its_own_name_and_nothing_is_done(shared: Shared) -> None:
    run = shared.run
    agent = own_heartbeat("agent-0001", every_s=1, health=Health.HEALTHY, sentence="", attempt="0001", may_act=True)
    assert run_as(COLLEAGUE, lambda: (raise_finding(run, FINDING), write_heartbeat(run, agent))) == ""
    place = run.watch_by(COLLEAGUE.pw_uid)
    modes = [f"{path.stat().st_mode & 0o7777:04o}" for path in (place, *place.iterdir())]
    (row,) = (row for row in table("What is stored with which mode") if "`watch/by/**`" in row)
    assert modes == [row[2], row[3], row[3]]
    assert read_findings(run) == [] and [heartbeat.name for heartbeat in read_heartbeats(run)] == ["agent"]
    (seen,) = read_all_findings(run)
    assert (seen.sentence, ["watcher of bin" in detail for detail in seen.details]) == (FINDING.sentence, [True])
    theirs = next(heartbeat for heartbeat in read_all_heartbeats(run) if heartbeat.name != "agent")
    assert (theirs.name, theirs.may_act) == ("agent-0001 of bin", False)
    assert run_as(OWNER, lambda: raise_finding(run, FINDING)) == ""
    assert read_findings(run) == [FINDING] == read_all_findings(run)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100000,
        '{"event": "raised", "kind": "k", "key": [], "sentence": {}, "noticed": 1}',
        '{"event": "raised", "kind": "k", "key": "k", "sentence": "s", "noticed": 1e300}',
        '{"event": "raised", "kind": "k", "key": "../../etc", "sentence": "s", "noticed": 1}',
        '{"event": "raised", "kind": "k", "key": "k", "sentence": "s", "noticed": 1e400}',
        '{"event": "cleared", "key": "stall:0001:45", "cleared": 1}',
        "\udcff" * 10,
    ],
)
def test_what_a_colleague_leaves_hides_nothing_and_stops_nobody(shared: Shared, line: str) -> None:
    run, place = shared.run, shared.run.watch_by(COLLEAGUE.pw_uid)
    assert run_as(OWNER, lambda: raise_finding(run, FINDING)) == ""

    def attack() -> None:
        place.mkdir()
        for name in ("findings.jsonl", "acts.jsonl", "outbox.jsonl", "agent.json"):
            (place / name).write_bytes(line.encode("utf-8", "surrogateescape") + b"\n")
        (run.watch_by(OWNER.pw_uid)).mkdir()

    assert run_as(COLLEAGUE, attack) == ""
    seen = read_watching(run, shared.attempt, time.time())
    assert (seen.findings, seen.acts, [heartbeat.name for heartbeat in seen.heartbeats]) == ((FINDING,), (), ["agent"])


@pytest.mark.parametrize("name", ["acts.jsonl", "findings.jsonl", "outbox.jsonl"])
def test_a_ledger_that_others_may_write_or_have_made_is_not_believed(shared: Shared, name: str) -> None:
    """Records of an older version were; and an owner may give the right away by mistake."""
    file = shared.run.watch / name
    act = {"key": f"{shared.keys}:1", "what": "fence", "state": "begun", "attempt": "0001", "who": "x", "why": ""}
    file.write_text(json.dumps({**act, "event": "raised", **asdict(FINDING)}) + "\n")
    os.chown(file, COLLEAGUE.pw_uid, -1)
    seen = read_watching(shared.run, shared.attempt, time.time())
    (theirs,) = seen.remarks
    assert (seen.findings, seen.acts, has_parts(theirs, file, "to bin", "to daemon")) == ((), (), True)
    os.chown(file, OWNER.pw_uid, -1)
    file.chmod(0o664)
    seen = read_watching(shared.run, shared.attempt, time.time())
    (open_to_others,) = seen.remarks
    assert (seen.findings, seen.acts, f"chmod go-w {file}" in open_to_others) == ((), (), True)


@pytest.mark.slow
def test_cancel_signals_only_the_process_of_the_attempt_and_only_for_its_owner(shared: Shared) -> None:
    assert "RunDirError" in (said := run_as(COLLEAGUE, lambda: cancel_run(shared.run)))
    assert "only daemon " in said
    with pytest.raises(RunDirError, match="only daemon"):
        cancel_run(shared.run)  # root neither
    other = subprocess.Popen(["sleep", "60"], user=OWNER.pw_uid, group=OWNER.pw_gid)
    named = Launcher(other.pid, start_ticks(other.pid) or 0, socket.gethostname())
    run_as(OWNER, lambda: write_job(shared.attempt, JobRecord("local", time.time(), launcher=named)))
    said = run_as(OWNER, lambda: cancel_run(shared.run))
    assert said.endswith(str(shared.attempt.path)) and other.poll() is None
    other.kill()
    other.wait()
    run_as(OWNER, lambda: write_job(shared.attempt, JobRecord("local", time.time(), launcher=shared.launcher())))
    assert run_as(OWNER, lambda: cancel_run(shared.run)) == "" and shared.process.wait(10) == -15
