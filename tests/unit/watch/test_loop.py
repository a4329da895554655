"""What a watcher says of a run that is over, and of what earlier attempts have left in the ledger."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.watch import watch
from bigsci_launch.errors import CollectError, SlurmUnavailable
from bigsci_launch.procfs import start_ticks
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.runs.watching.heartbeat import Health
from bigsci_launch.runs.watching.ledger import RunFinding, raise_finding, read_findings
from bigsci_launch.scheduler.local import Launcher
from bigsci_launch.watch.judge.silence import Pace, Silence
from bigsci_launch.watch.rounds.loop import (
    LEAST_EVERY_S,
    MOST_EVERY_S,
    SOON_S,
    Watcher,
    WatchStatus,
    _pause,
)
from bigsci_launch.watch.rounds.open_findings import OpenFindings
from bigsci_launch.watch.watched import watched_run
from tests.support.texts import has_parts


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two attempts of a run of the local launcher; the second has finished."""
    made = RunDir(tmp_path / "run")
    for name, reason in (("0001", "crashed"), ("0002", "finished")):
        attempt = made.attempt(name)
        attempt.make()
        write_job(attempt, JobRecord("local", time.time(), launcher=Launcher(2**22 + 1, 1, "elsewhere")))
        write_json(attempt.exit, {"reason": reason, "exit_code": int(reason != "finished"), "evidence": []})
    write_json(made.record, {})
    return made


def status_at(run: RunDir) -> WatchStatus:
    watcher = Watcher(watched_run(run), name="test", may_act=False, say=lambda words: None, tell=lambda finding: None)
    status = watcher.tick()
    watcher.close(status)
    return status


def test_what_an_earlier_attempt_had_is_over(run: RunDir) -> None:
    for kind in ("loss_spike", "restart_spike", "hang"):
        raise_finding(run, RunFinding(kind, f"{kind}:0001:9", "it was bad", time.time(), "0001", step=9))
    status = status_at(run)
    assert status.health is Health.HEALTHY, status.findings
    assert status.seen.view.is_over
    assert all(finding.cleared for finding in read_findings(run))


def test_a_hang_is_reported_again_once_a_look_accuses_a_rank(run: RunDir) -> None:
    told: list[RunFinding] = []
    findings = OpenFindings(run, lambda words: None, told.append)
    hang = RunFinding("hang", "stall:0002:9", "ranks 0-3 wait for each other", 1.0, "0002", bundle="/spy/1")
    named = replace(hang, sentence="rank 3 left the schedule", noticed=2.0, accuses=True)
    for finding in (hang, hang, named, named, replace(hang, noticed=3.0)):
        findings.raise_all([finding])
    assert told == [hang, named]


def test_a_run_that_ended_badly_is_a_finding_if_nothing_starts_it_again(run: RunDir) -> None:
    write_json(run.attempt("0002").exit, {"reason": "crashed", "exit_code": 1, "evidence": ["rank 3 was killed"]})
    status = status_at(run)
    assert status.health is Health.FINDING
    assert has_parts(status.sentence, "attempt 0002", "crashed")
    assert status.findings[0].details == ("rank 3 was killed",)


def test_a_directory_that_cannot_be_written_is_no_blindness(run: RunDir) -> None:
    run.watch.write_text("not a folder\n")
    status = status_at(run)
    assert status.health is Health.HEALTHY, status.blind
    assert any("heartbeat" in text for text in status.remarks)


def test_one_look_at_a_job_without_slurm_could_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(watch, ["--jobid", "4711", "--once"])
    assert isinstance(done.exception, CollectError)
    assert done.exception.exit_code == 4
    done = CliRunner().invoke(watch, ["--jobid", "4711"])
    assert isinstance(done.exception, SlurmUnavailable)


def test_a_run_whose_lines_are_not_known_is_not_said_to_be_in_its_start(run: RunDir) -> None:
    attempt = run.attempt("0002")
    attempt.exit.unlink()
    here = Launcher(os.getpid(), start_ticks(os.getpid()) or 0, socket.gethostname())
    write_job(attempt, JobRecord("local", time.time(), launcher=here))
    attempt.log_file(0).write_text("at 7 of 9\n")
    status = status_at(run)
    assert status.health is Health.BLIND, "nothing shows that it is healthy"
    assert has_parts(status.sentence, "no step") and "start" not in status.sentence


@pytest.mark.parametrize(
    ("usual_s", "lasts_s", "quiet_s", "look_in_s", "pause_s"),
    [
        (7.0, 3.0, None, 11.0, 7.0),
        (7.0, 3.0, None, 4.0, 4.0),
        (7.0, 3.0, None, 0.1, SOON_S),
        (7.0, 30.0, None, -3.0, 7.0),
        (None, 600.0, None, 90.0, MOST_EVERY_S),
        (None, 600.0, 0.5, 90.0, LEAST_EVERY_S),
    ],
)
def test_a_round_comes_with_each_step_with_calls_sooner_and_in_time_for_a_look(
    usual_s: float | None, lasts_s: float, quiet_s: float | None, look_in_s: float, pause_s: float
) -> None:
    silence = Silence(Pace.USUAL, "step", 45, lasts_s, usual_s, "", quiet_s=quiet_s)
    assert _pause(silence, look_in_s) == pause_s
