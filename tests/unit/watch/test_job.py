"""What a watcher asks of Slurm: one command at a time, never too often, and what was known stays known with its age."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.watch.facts import job
from bigsci_launch.watch.facts.job import JobPoller
from bigsci_launch.watch.watched import watched_run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SQUEUE = (
    "7|RUNNING|me|debug|2|n[0-1]|None|2026-11-25T10:00:00|2026-11-26T10:00:00|1:00|2026-11-25T10:00:00|run|bsl:{run}"
)


@pytest.fixture
def poller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPoller:
    """A job on a Slurm whose commands note when they were called."""
    programs, run = tmp_path / "bin", RunDir(tmp_path / "runs" / "run")
    programs.mkdir()
    answers = {
        "squeue": SQUEUE.format(run=run.path),
        "sinfo": "n0|mixed|none\\nn1|mixed|none",
        "scontrol": "",
        "sacct": "",
    }
    for name, answer in answers.items():
        words = f"#!/bin/bash\necho {name} $EPOCHREALTIME >> {tmp_path}/called\nprintf '{answer}\\n'\n"
        (programs / name).write_text(words)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    attempt = run.attempt("0001")
    attempt.make()
    run.record.write_text("{}")
    write_job(attempt, JobRecord("slurm", 0.0, job_id="7"))
    return JobPoller(watched_run(run))


def test_no_command_comes_sooner_than_it_may(
    poller: JobPoller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "_every_s", 0.3)
    poller.start()

    def calls() -> list[list[str]]:
        return [line.split() for line in (tmp_path / "called").read_text().splitlines()]

    wait_until(lambda: len(calls()) > 8 and poller.view.maintenance is not None)
    poller.stop()
    times = [float(moment) for _, moment in calls()]
    assert {name for name, _ in calls()} == {"squeue", "sinfo", "scontrol"}
    assert all(later - earlier >= 0.28 for earlier, later in itertools.pairwise(times)), times
    assert poller.view.is_running
    assert poller.view.maintenance == ()


def test_what_was_known_stays_known_with_its_age(poller: JobPoller, tmp_path: Path) -> None:
    poller.ask("job")
    known = poller.view
    assert known.is_running
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Socket timed out' >&2\nexit 1\n")
    poller.ask("job")
    assert poller.view.is_running
    assert poller.view.seen == known.seen
    assert "Socket timed out" in poller.view.why


def test_a_watcher_in_the_job_knows_that_it_runs(
    poller: JobPoller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho 'squeue: not allowed on compute nodes' >&2\nexit 1\n")
    poller.ask("job")
    assert not poller.view.is_running
    assert poller.view.seen is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    poller.ask("job")
    assert poller.view.is_running
    assert poller.view.job.hostlist == "n[0-1]"


def test_thirty_seconds_are_the_least(poller: JobPoller) -> None:
    assert poller._every_s == job.SLURM_EVERY_S == 30.0


def test_a_file_that_cannot_be_read_leaves_the_view_and_the_thread(
    poller: JobPoller, monkeypatch: pytest.MonkeyPatch
) -> None:
    poller.ask("job")

    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied", "job.json")

    monkeypatch.setattr(job, "query_attempt", refuse)
    poller.ask("job")
    assert poller.view.is_running
    assert "job.json" in poller.view.why
