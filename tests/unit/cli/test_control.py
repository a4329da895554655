"""`bsl control` at the terminal: what is asked is written down, and what cannot come true is refused at once."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.cli.main import bsl
from bigsci_launch.procfs import start_ticks
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.control.requests import read_waiting
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.runs.watching.heartbeat import Health, own_heartbeat, write_heartbeat
from bigsci_launch.scheduler.local import Launcher
from tests.support.texts import has_parts

ME = pwd.getpwuid(os.getuid()).pw_name


def control(*words: str) -> Result:
    return CliRunner().invoke(bsl, ["control", *words])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """Run `demo`, whose attempt runs and has done 7 steps."""
    monkeypatch.setenv("BSL_RUNS", str(tmp_path))
    run = RunDir((tmp_path / "demo").resolve())
    attempt = run.attempt("0001")
    attempt.make()
    write_json(run.record, {"name": "demo"})
    process = subprocess.Popen(["sleep", "60"])
    launcher = Launcher(process.pid, start_ticks(process.pid) or 0, socket.gethostname())
    write_job(attempt, JobRecord("local", time.time(), launcher=launcher, total_steps=100))
    attempt.event_file(0).write_text(json.dumps({"kind": "step", "step": 7, "time": time.time()}) + "\n")
    yield run
    process.kill()
    process.wait()


def test_a_request_is_written_and_said_to_wait_if_nobody_watches(run: RunDir, check_text: Any) -> None:
    done = control("demo", "restart", "--why", "a new\nrevision", "--after-step", "8")
    assert done.exit_code == 0
    check_text(done.stdout, done.stderr)
    (found,) = read_waiting(run)
    assert (found.verb, found.who, found.why, found.after_step, found.attempt, found.wrong) == (
        *("restart", ME, "a new revision"),
        *(8, "0001", None),
    )
    assert [line.split() for line in control("demo").stdout.splitlines()][3][2:6] == ["restart", "after", "step", "8"]


def test_a_watcher_that_lives_is_named_and_one_that_is_dead_is_not(run: RunDir) -> None:
    sign = own_heartbeat("agent", every_s=10, health=Health.HEALTHY, sentence="", attempt="0001", may_act=False)
    write_heartbeat(run, sign)
    document = json.loads(control("demo", "dump", "--why", "slow", "--json").stdout)
    assert [each["name"] for each in document["watchers"]] == ["agent"]
    assert has_parts(document["next"][1], "agent", socket.gethostname(), "10 s")
    write_json(run.watcher_file("agent"), {**json.loads(run.watcher_file("agent").read_text()), "pid": 2**22 + 1})
    document = json.loads(control("demo", "dump", "--why", "slow", "--json").stdout)
    assert document["watchers"] == [] and "no watcher runs for demo" in document["next"][1]


@pytest.mark.parametrize(
    "words",
    [
        ("exit",),
        ("exit", "--why", " "),
        ("stop", "--why", "x"),
        ("dump", "--why", "x", "--after-step", "9"),
        ("--why", "x"),
        ("save", "--why", "x", "--after-step", "7"),
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused(run: RunDir, words: tuple[str, ...], check_text: Any) -> None:
    done = control("demo", *words)
    assert (done.exit_code, run.control.exists()) == (2, False)
    check_text(done.stderr)


def test_a_run_that_has_ended_is_asked_nothing(run: RunDir) -> None:
    write_job(
        run.attempt("0001"), JobRecord("local", time.time(), launcher=Launcher(2**22 + 1, 1, socket.gethostname()))
    )
    write_json(run.attempt("0001").exit, {"reason": "crashed", "exit_code": 1})
    done = control("demo", "exit", "--why", "x")
    assert (done.exit_code, has_parts(done.stderr, "0001", "demo", "FAILED")) == (2, True)
    assert not run.control.exists()


def test_a_folder_that_cannot_be_written_says_who_may(run: RunDir) -> None:
    run.control.write_text("a file where the folder should be")
    done = control("demo", "exit", "--why", "x")
    assert done.exit_code == 2 and f"else ask {ME}" in done.stderr
