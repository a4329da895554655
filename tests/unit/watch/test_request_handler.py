"""The handler of requests to a run: each once, whatever happens to its watcher, and never for the wrong job."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.procfs import start_ticks
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.control import requests
from bigsci_launch.runs.control.request import WITH_STEP, Request, read_requests
from bigsci_launch.runs.control.requests import taken_up, waiting, write_request
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.runs.watching.heartbeat import Health, own_heartbeat, write_heartbeat
from bigsci_launch.runs.watching.ledger import Act, read_acts
from bigsci_launch.scheduler.job import format_comment
from bigsci_launch.scheduler.local import Launcher
from bigsci_launch.watch.act.jobs import how_ended
from bigsci_launch.watch.act.request_handler import RequestHandler, grace_s
from tests.support.texts import has_parts

from ..other_users import AS_ROOT, MALLORY

pytestmark = pytest.mark.slow

ME = pwd.getpwuid(os.getuid()).pw_name
GRACE_S = 60.0
Install = Callable[..., Any]


class Office:
    """A run whose attempt is a process that sleeps, its handler, and a clock that only the test moves."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder)
        self.attempt = self.run.attempt("0001")
        self.now = time.time()
        self.looks = 0
        self.step: int | None = 4
        self.processes: list[subprocess.Popen[bytes]] = []
        self.attempt.make()
        write_json(self.run.record, {"name": "trial"})
        self.run.control.mkdir()

    def local(self, total_steps: int | None = 100) -> subprocess.Popen[bytes]:
        """Make the attempt a launcher on this machine."""
        process = subprocess.Popen([str(self.attempt.path), "60"], executable="/bin/sleep")
        self.processes.append(process)
        launcher = Launcher(process.pid, start_ticks(process.pid) or 0, socket.gethostname())
        write_job(self.attempt, JobRecord("local", self.now, launcher=launcher, total_steps=total_steps))
        return process

    def slurm(self, total_steps: int | None = None) -> None:
        """Make the attempt job 77, whose ranks run in its step 1."""
        write_job(self.attempt, JobRecord("slurm", self.now, job_id="77", total_steps=total_steps))
        write_json(self.attempt.pid_file(0), {"rank": 0, "job_id": "77", "step_id": "1"})

    def handler(self, name: str = "agent") -> RequestHandler:
        write_heartbeat(
            self.run,
            own_heartbeat(name, every_s=1, health=Health.HEALTHY, sentence="", attempt="0001", may_act=False),
        )
        return RequestHandler(self.run, name, self.look, lambda: self.now)

    def look(self) -> tuple[Path | None, str]:
        self.looks += 1
        return self.run.bundles / "1", "rank 1 is hung"

    def serve(self, handler: RequestHandler, after_s: float = 1.0, rounds: int = 1) -> list[str]:
        said = []
        for _ in range(rounds):
            self.now += after_s
            said += [f"{act.what} {act.state}: {act.words}" for act in handler.serve(self.now, self.step, GRACE_S)]
        return said

    def ask(self, verb: str, after_step: int | None = None, why: str = "why not", attempt: str = "0001") -> None:
        write_request(self.run, verb, why, after_step=after_step, attempt=attempt)

    def last(self, what: str) -> Act:
        return [act for act in read_acts(self.run) if act.what == what][-1]

    def asked(self) -> list[Request]:
        return read_requests(self.attempt, WITH_STEP)

    def saved(self, key: str, step: int) -> None:
        event = {"kind": "save", "step": step, "path": "p", "seconds": 1.25, "request": key}
        self.attempt.event_file(0).write_text(json.dumps(event) + "\n")


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path / "trial")
    yield office
    for process in office.processes:
        process.kill()
        process.wait()


def test_a_save_that_the_disk_refuses_is_answered_with_the_reason(office: Office) -> None:
    office.local()
    handler = office.handler()
    office.ask("save")
    office.serve(handler)
    (asked,) = office.asked()
    refused = {"kind": "save_refused", "step": 5, "text": "p: No space left on device (ENOSPC)", "request": asked.key}
    office.attempt.event_file(0).write_text(json.dumps(refused) + "\n")
    office.serve(handler)
    answer = office.last("save")
    assert answer.state == "failed" and refused["text"] in answer.words
    office.serve(handler)
    assert office.asked() == []


def test_a_save_is_done_when_its_checkpoint_is_there(office: Office) -> None:
    office.local()
    handler = office.handler()
    office.ask("save")
    office.ask("save", after_step=9)
    office.serve(handler)
    first, second = sorted(office.asked(), key=lambda request: request.after_step or 0)
    assert (first.after_step, second.after_step) == (None, 9)
    assert office.serve(handler, 10, rounds=3) == []
    office.saved(first.key, 5)
    (said,) = office.serve(handler)
    assert has_parts(said, "save done: ", "step 5", "1.2 s")
    assert office.asked() == [second]
    assert office.serve(handler, GRACE_S, rounds=5) == [], "step 9 may be far away"
    office.step = 9
    office.serve(handler)
    (said,) = office.serve(handler, GRACE_S)
    assert has_parts(said, "save failed: ", "1 min 00 s", "9")
    assert office.asked() == []


@pytest.mark.parametrize(
    ("verb", "after_step", "attempt"),
    [("exit", 4, "0001"), ("exit", None, "0000"), ("stop", None, "0001")],
    ids=["past step", "other attempt", "no verb"],
)
def test_what_cannot_come_true_is_refused(
    office: Office, verb: str, after_step: int | None, attempt: str, check_text: Callable[..., None]
) -> None:
    process = office.local()
    handler = office.handler()
    office.ask(verb, after_step, attempt=attempt)
    check_text(*office.serve(handler))
    assert office.serve(handler, GRACE_S, rounds=5) == []
    assert (waiting(office.run), office.attempt.ended_by.exists(), process.poll()) == ([], False, None)


def test_a_plain_file_from_before_the_attempt_does_not_stop_it(office: Office) -> None:
    later = office.run.attempt("0002")
    write_json(office.attempt.exit, {"reason": "stopped", "exit_code": 0})
    for name in ("exit", "restart"):
        (office.run.control / name).write_text("please")
    os.utime(office.run.control / "exit", (office.now - 3600, office.now - 3600))
    os.utime(office.run.control / "restart", (office.now + 60, office.now + 60))
    office.attempt = later
    later.make()
    office.local()
    said = office.serve(office.handler())
    assert has_parts(said[0], "exit refused: ", "0002")
    (stop,) = office.asked()
    assert (stop.key, stop.verb, stop.who, stop.why) == (office.last("restart").key, "restart", ME, "please")


def test_an_attempt_that_has_ended_is_asked_nothing(office: Office) -> None:
    office.local()
    handler = office.handler()
    office.ask("save")
    office.serve(handler)
    write_json(office.attempt.exit, {"reason": "crashed", "exit_code": 1})
    (office.run.control / "kill").write_text("too late")
    said = office.serve(handler)
    assert [line.partition(":")[0] for line in said] == ["kill refused", "save failed"]
    assert all(has_parts(line, "0001", "crashed") for line in said)


def test_an_empty_file_may_be_filled_in_a_moment(office: Office) -> None:
    office.local()
    handler = office.handler()
    (office.run.control / "dump").touch()
    assert office.serve(handler) == []
    (office.run.control / "dump").write_text("slow")
    assert [line.split(":")[0] for line in office.serve(handler)] == ["dump begun", "dump begun", "dump done"]
    (office.run.control / "dump").touch()
    office.serve(handler, rounds=2)
    assert (office.looks, office.last("dump").state, office.last("dump").why) == (2, "done", "")


def test_ranks_that_do_not_stop_are_looked_at_and_ended_and_the_newest_request_counts(office: Office) -> None:
    process = office.local()
    handler = office.handler()
    office.ask("exit", after_step=50)
    office.serve(handler)
    (stop,) = office.asked()
    assert (stop.key, stop.after_step, stop.verb, stop.why) == (office.last("exit").key, 50, "exit", "why not")
    assert not office.attempt.ended_by.exists(), "before step 50, the attempt may end for another reason"
    office.now += 1
    office.ask("restart")
    assert has_parts(office.serve(handler)[0], "exit refused: ", f"restart of {ME}")
    assert json.loads(office.attempt.ended_by.read_text())["continues"] is True
    assert office.serve(handler, GRACE_S / 2, rounds=2) == [], "they have time"
    assert (office.looks, process.poll()) == (0, None)
    looking, ended = office.serve(handler, GRACE_S / 2)
    assert looking.startswith("restart begun: ")
    assert has_parts(ended, "restart begun: ", "1 min 00 s", "rank 1 is hung")
    assert process.wait(180) == -signal.SIGTERM
    by = json.loads(office.attempt.ended_by.read_text())
    assert (by["act"], by["continues"], by["bundle"]) == ("restart", True, str(office.run.bundles / "1"))
    assert has_parts(office.serve(handler)[0], "restart done: ", "0001")


def test_requests_of_a_watcher_that_is_gone_are_taken_over_and_those_of_a_living_one_are_not(office: Office) -> None:
    office.local()
    office.ask("save")
    office.serve(office.handler("first"))
    assert office.serve(office.handler("second"), 300, rounds=3) == []
    write_json(
        office.run.watcher_file("first"),
        {**json.loads(office.run.watcher_file("first").read_text()), "host": "elsewhere", "time": office.now - 900},
    )
    second = office.handler("second")
    office.serve(second, 30, rounds=3)
    assert [taken.watcher for taken in taken_up(office.run)] == ["first"], "its clock may be late"
    office.serve(second, 50, rounds=2)
    assert [taken.watcher for taken in taken_up(office.run)] == ["second"]
    assert [request.key for request in office.asked()] == [office.last("save").key]


def test_on_slurm_only_the_step_of_the_ranks_is_touched(office: Office, fake_slurm: Install) -> None:
    fake = fake_slurm("squeue", "scancel", "scontrol")
    comment = format_comment(str(office.run.path))
    fake.answer("squeue", f"77|RUNNING|{ME}|debug|1|n0|None|N/A|N/A|1:00|N/A|trial|{comment}\n")
    office.slurm()
    handler = office.handler()
    office.ask("exit", after_step=6)
    office.serve(handler, GRACE_S, rounds=3)
    assert fake.calls("scancel") == []
    office.step = 6
    office.serve(handler)
    office.serve(handler, GRACE_S, rounds=2)
    office.serve(handler, 5)
    office.serve(handler, 15)
    calls = [call["argv"][1:] for call in fake.calls("scancel")]
    assert calls == [["--signal=URG", "77.1"], ["--signal=TERM", "77.1"], ["77.1"]]
    assert office.last("exit").stage == "killed"
    office.serve(handler, 200)
    assert office.last("exit").state == "failed" and has_parts(office.last("exit").words, "120 s", "KILL")


def test_a_job_that_is_not_known_to_be_ours_is_left_alone(office: Office, fake_slurm: Install) -> None:
    fake = fake_slurm("squeue", "scancel", "scontrol")
    fake.answer("squeue", f"77|RUNNING|{ME}|debug|1|n0|None|N/A|N/A|1:00|N/A|other|bsl:/another/run\n")
    office.slurm()
    office.ask("kill")
    office.serve(office.handler())
    assert fake.calls("scancel") == []
    assert office.last("kill").state == "failed" and "belongs to another run" in office.last("kill").words


def test_a_silent_controller_is_asked_again_and_not_too_often(office: Office, fake_slurm: Install) -> None:
    fake = fake_slurm("squeue", "scancel", "scontrol")
    fake.answer("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", rc=1)
    office.slurm()
    handler = office.handler()
    office.ask("kill")
    said = office.serve(handler, 2, rounds=30)
    assert [line.split(":")[0] for line in said] == ["kill begun", "kill begun"], "the trouble is said once"
    assert "Unable to contact" in said[1] and len(fake.calls("squeue")) <= 2
    assert fake.calls("scancel") == []
    comment = format_comment(str(office.run.path))
    fake.answer("squeue", f"77|RUNNING|{ME}|debug|1|n0|None|N/A|N/A|1:00|N/A|trial|{comment}\n")
    office.serve(handler, 30)
    assert [call["argv"][1:] for call in fake.calls("scancel")] == [["--signal=TERM", "77.1"]]


def test_a_save_of_a_program_that_is_not_ours_is_refused(office: Office) -> None:
    office.local(total_steps=None)
    office.ask("save")
    (said,) = office.serve(office.handler())
    assert has_parts(said, "save refused: ", "`bsl train`")


CHANGES = ("os.mkdir", "os.rename", "os.link", "os.remove", "os.chmod", "os.kill")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def test_a_watcher_that_is_killed_at_any_call_forgets_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    num_kills = 0
    while True:
        office = Office(tmp_path / f"{num_kills:03d}")
        process = office.local()
        office.ask("exit")
        office.ask("dump")
        status = in_child(lambda office=office: serve_until_over(office), kill_at=num_kills)
        if status == 0:
            process.wait(180)
            break
        assert status == signal.SIGKILL
        assert in_child(lambda office=office: serve_until_over(office)) == 0
        acts = read_acts(office.run)
        for what in ("exit", "dump"):
            lines = [act for act in acts if act.what == what]
            assert [act.state for act in lines if act.state != "begun"] == ["done"], (num_kills, lines)
            stages = [act.stage for act in lines]
            assert all(stages.count(stage) <= 2 for stage in stages), (num_kills, stages)
        assert json.loads(office.attempt.ended_by.read_text())["act"] == "exit"
        assert (waiting(office.run), process.wait(180)) == ([], -signal.SIGTERM), num_kills
        num_kills += 1
    assert num_kills > 60


def serve_until_over(office: Office) -> None:
    handler = office.handler()
    for _ in range(20):
        office.serve(handler, GRACE_S)
        acts = read_acts(office.run)
        if sum(act.state != "begun" for act in acts) == 2:
            return
        while any(act.stage == "ended" for act in acts) and not how_ended(office.attempt):
            time.sleep(0.001)  # a process that gets TERM needs a moment
    os._exit(1)


def in_child(work: Callable[[], None], kill_at: int | None = None) -> int:
    """Run `work` in a child that is killed just before its n-th call that changes a file or a process."""
    pid = os.fork()
    if pid == 0:
        num_calls = 0

        def count(event: str, arguments: Any) -> None:
            nonlocal num_calls
            if event in CHANGES or (event == "open" and arguments[2] & WRITES):
                if num_calls == kill_at:
                    signal.raise_signal(signal.SIGKILL)
                num_calls += 1

        sys.addaudithook(count)
        try:
            work()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(2)
        os._exit(0)
    return abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


@AS_ROOT
def test_a_flood_of_one_user_delays_nobody(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is old, and nothing but it fits into a look, were it not that the owner and others have their turn."""
    office.local()
    handler = office.handler()
    monkeypatch.setattr(requests, "MOST_AT_ONCE", 5)
    for number in range(300):
        path = office.run.control / f"save-{number}-1.json"
        path.write_text("{}")
        os.utime(path, (1e9 + number, 1e9 + number))
        os.chown(path, MALLORY, -1)
    (office.run.control / "dump").write_text("by somebody else")
    os.chown(office.run.control / "dump", MALLORY + 1, -1)
    (office.run.control / ".x").write_text("by whom?")
    (office.run.control / "exit").hardlink_to(office.run.control / ".x")
    office.ask("save")
    said = office.serve(handler)
    assert has_parts(said[0], "requests refused: ", 290, 10)
    assert any(line.startswith("save begun: ") for line in said)
    refused = [act.who for act in read_acts(office.run) if act.state == "refused" and act.what != "requests"]
    assert sorted(refused) == sorted([f"uid {MALLORY}", f"uid {MALLORY}", ME, f"uid {MALLORY + 1}"])
    assert len(waiting(office.run)) == 5 and len(list(office.run.control.iterdir())) == 9
    (office.run.control / "save-0-1.json").touch()
    assert not any("removed unread" in words for words in office.serve(handler, rounds=2))
    assert waiting(office.run) == []


@AS_ROOT
def test_what_is_carried_through_counts_as_waiting(office: Office) -> None:
    """Otherwise a member of the group fills the ledger with requests that all are accepted."""
    office.local()
    nobody = pwd.getpwnam("nobody")
    os.chown(office.run.path, -1, nobody.pw_gid)
    handler = office.handler()
    for number in range(25):
        path = office.run.control / f"save-{number}-1.json"
        path.write_text("{}")
        os.chown(path, nobody.pw_uid, -1)
        office.serve(handler)
    assert [taken.request.who for taken in taken_up(office.run)] == ["nobody"] * 10
    assert sum(act.what == "requests" for act in read_acts(office.run)) == 1


def test_only_some_files_are_looked_at_in_one_look_and_all_have_their_turn(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office.local()
    monkeypatch.setattr(requests, "MOST_LOOKED_AT", 3)
    for number in range(9):
        (office.run.control / f"stop{number}").touch()
    assert len(waiting(office.run)) == 3
    handler = office.handler()
    office.serve(handler, rounds=60)
    assert waiting(office.run) == []


def test_what_was_measured_counts_more_than_what_is_expected() -> None:
    assert grace_s({"step": 100.0, "save": 40.0, "eval": 720.0}.get, None) == 30 + 300 + 80 + 1440
    assert grace_s({"step": 100.0}.get, None) == 30 + 300 + 2 * 60, "no save was seen yet"
    assert grace_s({}.get, None) == 30 + 3 * 120 + 2 * 60, "a watcher that has just begun must not end a step"
