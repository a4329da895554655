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

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.cli.main import bsl
from bigsci_launch.procfs import start_ticks
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.control.requests import read_waiting
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.runs.watching.beat import Health, own_beat, write_beat
from bigsci_launch.scheduler.local import Launcher

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


def test_a_request_is_written_and_said_to_wait_if_nobody_watches(run: RunDir) -> None:
    done = control("demo", "restart", "--why", "a new\nrevision", "--after-step", "8")
    assert (done.exit_code, done.stdout) == (0, "asked of demo, attempt 0001: restart after step 8\n")
    assert "nobody watches demo: the request waits until its owner starts `bsl watch demo`" in done.stderr
    assert "nothing starts the run again by itself" in done.stderr
    (found,) = read_waiting(run)
    assert (found.verb, found.who, found.why, found.after_step, found.attempt, found.wrong) == (
        *("restart", ME, "a new revision"),
        *(8, "0001", None),
    )
    assert [line.split() for line in control("demo").stdout.splitlines()][3][2:6] == ["restart", "after", "step", "8"]


def test_a_watcher_that_lives_is_named_and_one_that_is_dead_is_not(run: RunDir) -> None:
    sign = own_beat("agent", every_s=10, health=Health.HEALTHY, sentence="", attempt="0001", may_act=False)
    write_beat(run, sign)
    document = json.loads(control("demo", "dump", "--why", "slow", "--json").stdout)
    assert [each["name"] for each in document["watchers"]] == ["agent"]
    assert document["next"][1] == f"it is taken up by agent on {socket.gethostname()}, which looks every 10 s"
    write_json(run.watcher_file("agent"), {**json.loads(run.watcher_file("agent").read_text()), "pid": 2**22 + 1})
    document = json.loads(control("demo", "dump", "--why", "slow", "--json").stdout)
    assert document["watchers"] == [] and "nobody watches demo" in document["next"][1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("exit",), "say why, for the others in the group: bsl control demo exit --why TEXT"),
        (("exit", "--why", " "), "say why"),
        (("stop", "--why", "x"), "'stop' is not one of 'save', 'exit', 'restart', 'dump', 'kill'"),
        (("dump", "--why", "x", "--after-step", "9"), "dump is done at once: leave out --after-step"),
        (("--why", "x"), "name what is asked: save, exit, restart, dump, kill"),
        (("save", "--why", "x", "--after-step", "7"), "step 7 of demo is past: 7 steps are done"),
    ],
)
def test_what_makes_no_sense_is_refused(run: RunDir, words: tuple[str, ...], said: str) -> None:
    done = control("demo", *words)
    assert done.exit_code == 2 and said in done.stderr
    assert not run.control.exists()


def test_a_run_that_has_ended_is_asked_nothing(run: RunDir) -> None:
    write_job(
        run.attempt("0001"), JobRecord("local", time.time(), launcher=Launcher(2**22 + 1, 1, socket.gethostname()))
    )
    write_json(run.attempt("0001").exit, {"reason": "crashed", "exit_code": 1})
    done = control("demo", "exit", "--why", "x")
    assert (done.exit_code, done.stderr.splitlines()[0]) == (2, "error: attempt 0001 of demo has ended: FAILED")
    assert not run.control.exists()


def test_a_folder_that_cannot_be_written_says_who_may(run: RunDir) -> None:
    run.control.write_text("a file where the folder should be")
    done = control("demo", "exit", "--why", "x")
    assert done.exit_code == 2 and f"else ask {ME}" in done.stderr
