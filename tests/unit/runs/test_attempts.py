"""The state of an attempt: which source is believed, and what is reported if none knows."""

from __future__ import annotations

import json
import os
import pwd
import socket
from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.errors import RunDirError
from bigsci_launch.procfs import start_ticks
from bigsci_launch.runs.attempts import JobRecord, query_attempt, query_attempts, read_exit, read_job, write_job
from bigsci_launch.scheduler.job import JobState
from bigsci_launch.scheduler.local import Launcher
from tests.support.texts import has_parts

Install = Callable[..., Any]
USER = pwd.getpwuid(os.getuid()).pw_name
INVALID = "slurm_load_jobs error: Invalid job id specified\n"


def line(job_id: str, state: str) -> str:
    return f"{job_id}|{state}|{USER}|debug|4|n[0-3]|None|2026-11-21T01:02:03|N/A|1:00|N/A|trial|(null)\n"


def test_a_job_record_reads_back(trial: Any) -> None:
    for record in (
        JobRecord("slurm", 1.5, job_id="7", total_steps=3),
        JobRecord("slurm", 1.5, job_id="7", cluster="moon", requeue=True),
        JobRecord("local", 2.0, launcher=Launcher(5, 6, "h")),
    ):
        write_job(trial.attempt, record)
        assert read_job(trial.attempt) == record


def test_a_job_record_of_an_older_version_reads_back(trial: Any) -> None:
    older = {
        "schema_version": 1,
        "scheduler": "slurm",
        "submitted": 1.5,
        "job_id": "7",
        "launcher": None,
        "total_steps": 3,
    }
    trial.attempt.job.write_text(json.dumps(older))
    assert read_job(trial.attempt) == JobRecord("slurm", 1.5, job_id="7", total_steps=3)


@pytest.mark.parametrize("text", ["{}", "[]", '{"scheduler": ', '{"launcher": {"pid": 1}}'])
def test_a_broken_job_record_is_one_clear_error(trial: Any, text: str) -> None:
    trial.attempt.job.write_text(text)
    with pytest.raises(RunDirError, match=r"job\.json"):
        read_job(trial.attempt)


def test_squeue_comes_first(fake_slurm: Install, trial: Any) -> None:
    fake_slurm("squeue").answer("squeue", line("12", "RUNNING"))
    trial.ended("crashed", 1)
    job = query_attempt(trial.attempt)
    assert (job.state, job.source, job.hostlist) == (JobState.RUNNING, "squeue", "n[0-3]")


def test_exit_json_speaks_for_a_job_that_left_the_queue(fake_slurm: Install, trial: Any) -> None:
    fake_slurm("squeue").answer("squeue", stderr=INVALID, rc=1)
    trial.ended("time_limit", 143, slurm_reason="TimeLimit")
    job = query_attempt(trial.attempt)
    assert (job.state, job.source, job.reason) == (JobState.TIMEOUT, "exit.json", "TimeLimit")


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("finished", JobState.COMPLETED),
        ("stopped", JobState.COMPLETED),
        ("crashed", JobState.FAILED),
        ("launch_failed", JobState.FAILED),
        ("cancelled", JobState.CANCELLED),
        ("node_failure", JobState.NODE_FAIL),
        ("a word of tomorrow", JobState.UNKNOWN),
    ],
)
def test_every_reason_is_a_state(fake_slurm: Install, trial: Any, reason: str, state: JobState) -> None:
    fake_slurm()
    trial.ended(reason, 0)
    assert query_attempt(trial.attempt).state is state


def test_nobody_knows_and_says_why(fake_slurm: Install, trial: Any) -> None:
    fake_slurm("squeue").answer("squeue", stderr=INVALID, rc=1)
    job = query_attempt(trial.attempt)
    assert job.state is JobState.UNKNOWN
    assert has_parts(job.reason, "squeue", "sacct", "exit.json")


def test_an_absent_slurm_is_a_reason_and_no_error(fake_slurm: Install, trial: Any) -> None:
    fake_slurm()
    job = query_attempt(trial.attempt)
    assert job.state is JobState.UNKNOWN and has_parts(job.reason, "squeue")


def test_slurm_speaks_of_the_last_start_of_a_requeued_job(fake_slurm: Install, trial: Any) -> None:
    fake_slurm("squeue").answer("squeue", line("12", "RUNNING"))
    trial.ended("requeued", 143)
    trial.add_attempt("0001.r1")
    states = query_attempts(trial.run.attempts())
    assert {name: job.state for name, job in states.items()} == {"0001": JobState.REQUEUED, "0001.r1": JobState.RUNNING}


def test_a_requeue_shares_the_job_record_of_its_attempt(trial: Any) -> None:
    trial.add_attempt("0001.r1").job.unlink()
    record = read_job(trial.run.attempt("0001.r1"))
    assert record is not None and record.job_id == "12"


def test_a_torn_exit_record_is_none(trial: Any) -> None:
    trial.attempt.exit.write_text('{"reason": "cra')
    assert read_exit(trial.attempt) is None


def me() -> Launcher:
    return Launcher(os.getpid(), start_ticks(os.getpid()) or 0, socket.gethostname())


@pytest.mark.parametrize(
    ("launcher", "state", "word"),
    [
        (me(), JobState.RUNNING, ""),
        (Launcher(me().pid, me().start_ticks - 1, me().host), JobState.UNKNOWN, "gone"),
        (Launcher(me().pid, me().start_ticks, "elsewhere"), JobState.UNKNOWN, "only be checked there"),
    ],
)
def test_local_attempts(trial: Any, launcher: Launcher, state: JobState, word: str) -> None:
    write_job(trial.attempt, JobRecord("local", 1.0, launcher=launcher))
    job = query_attempt(trial.attempt)
    assert job.state is state and word in job.reason


def test_a_reused_pid_is_another_process(trial: Any) -> None:
    write_job(trial.attempt, JobRecord("local", 1.0, launcher=Launcher(me().pid, 1, me().host)))
    trial.ended("crashed", 137)
    assert query_attempt(trial.attempt).state is JobState.FAILED
