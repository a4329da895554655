"""A job id alone says nothing: status, submit and cancel first look whose job it is."""

from __future__ import annotations

import json
import os
import pwd
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.errors import RunDirError
from bigsci_launch.launch.decide import find_turn
from bigsci_launch.runs.attempts import JobRecord, query_attempt, query_attempts, read_job, write_job
from bigsci_launch.scheduler.job import JobState, format_comment
from tests.support.command import invoke
from tests.support.texts import has_parts

pytestmark = pytest.mark.slow

Install = Callable[..., Any]
USER = pwd.getpwuid(os.getuid()).pw_name
CONFIG = "ClusterName             = {}\n"


def line(
    comment: object = "(null)", *, state: str = "RUNNING", user: str = USER, name: str = "trial", age_s: float = 5000
) -> str:
    """What squeue says about job 12; `comment` may be a run's path. It was submitted `age_s` ago."""
    said = format_comment(str(comment)) if isinstance(comment, Path) else comment
    submitted = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - age_s))
    return f"12|{state}|{user}|debug|4|n[0-3]|None|2026-11-21T01:02:03|N/A|1:00|{submitted}|{name}|{said}\n"


@pytest.fixture
def slurm(fake_slurm: Install) -> Any:
    fake = fake_slurm("squeue", "sinfo", "scancel", "scontrol")
    fake.answer("scontrol", CONFIG.format("moon"))
    return fake


def test_a_job_of_another_run_is_not_ours(slurm: Any, trial: Any, tmp_path: Path) -> None:
    slurm.answer("squeue", line(tmp_path / "runs" / "victim"))
    job = query_attempt(trial.attempt)
    assert (job.state, job.source) == (JobState.UNKNOWN, "none")
    assert has_parts(job.reason, "job 12", f"{tmp_path}/runs/victim")
    assert json.loads(invoke("status", "--json").stdout)["exit"] is None
    trial.ended("finished", 0)
    job = query_attempt(trial.attempt)
    assert (job.state, job.source) == (JobState.COMPLETED, "exit.json")
    [run] = json.loads(invoke("list", "--json").stdout)["runs"]
    assert run["state"] == "COMPLETED"


def test_a_finished_run_whose_id_was_given_again_can_be_submitted_again(slurm: Any, trial: Any, tmp_path: Path) -> None:
    trial.ended("finished", 0)
    slurm.answer("squeue", line(tmp_path / "runs" / "victim"))
    find_turn(trial.run, None)
    slurm.answer("squeue", line(trial.run.path))
    with pytest.raises(RunDirError, match="is RUNNING"):
        find_turn(trial.run, None)


def test_cancel_ends_its_own_job(slurm: Any, trial: Any) -> None:
    slurm.answer("squeue", line(trial.run.path))
    assert invoke("cancel", "trial").exit_code == 0
    assert [call["argv"] for call in slurm.calls("scancel")] == [["scancel", "12"]]


@pytest.mark.parametrize("ended", [True, False])
def test_cancel_does_not_end_the_job_of_another_run(slurm: Any, trial: Any, tmp_path: Path, ended: bool) -> None:
    if ended:
        trial.ended("finished", 0)
    slurm.answer("squeue", line(tmp_path / "runs" / "victim"))
    done = invoke("cancel", "trial")
    assert done.exit_code == 2 and has_parts(done.stderr, "bsl status --jobid 12", f"{tmp_path}/runs/victim")
    assert ("COMPLETED" in done.stderr) == ended
    assert not slurm.calls("scancel")


def test_a_run_may_be_named_through_a_link(slurm: Any, trial: Any, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    slurm.answer("squeue", line(tmp_path / "link" / "trial"))
    assert query_attempt(trial.attempt).state is JobState.RUNNING
    assert invoke("cancel", "trial").exit_code == 0


@pytest.mark.parametrize(
    ("said", "why"),
    [(line(user="somebody-else"), "to user somebody-else"), (line(name="other"), "named other")],
    ids=["user", "name"],
)
def test_without_a_comment_name_and_user_may_show_that_it_is_anothers(
    slurm: Any, trial: Any, said: str, why: str
) -> None:
    slurm.answer("squeue", said)
    job = query_attempt(trial.attempt)
    assert job.state is JobState.UNKNOWN and why in job.reason
    assert invoke("cancel", "trial").exit_code == 2
    assert not slurm.calls("scancel")


def test_without_a_comment_nobody_is_ended_on_suspicion(slurm: Any, trial: Any) -> None:
    slurm.answer("squeue", line())
    assert query_attempt(trial.attempt).state is JobState.RUNNING
    done = invoke("cancel", "trial")
    assert done.exit_code == 2 and "`scancel 12`" in done.stderr
    assert not slurm.calls("scancel")


def test_the_time_of_submission_identifies_a_job_without_a_comment(slurm: Any, trial: Any) -> None:
    slurm.answer("squeue", line(age_s=100))
    assert invoke("cancel", "trial").exit_code == 0
    assert len(slurm.calls("scancel")) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"stderr": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", "rc": 1},
        {"stderr": "slurm_load_jobs error: Invalid job id specified\n", "rc": 1},
    ],
    ids=["silent", "forgotten"],
)
def test_an_unknown_job_is_not_ended(slurm: Any, trial: Any, answer: dict[str, Any]) -> None:
    slurm.answer("squeue", **answer)
    done = invoke("cancel", "trial")
    assert done.exit_code == 2 and "scancel 12" in done.stderr
    assert not slurm.calls("scancel")


@pytest.mark.parametrize(("private", "user", "is_gone"), [("jobs", 1, False), ("nodes", 1, True), ("jobs", 0, True)])
def test_a_job_that_the_cluster_may_hide_is_not_gone(
    slurm: Any, trial: Any, monkeypatch: pytest.MonkeyPatch, private: str, user: int, is_gone: bool
) -> None:
    slurm.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    slurm.answer("scontrol", f"{CONFIG.format('moon')}PrivateData             = {private}\n")
    monkeypatch.setattr("os.geteuid", lambda: user)
    job = query_attempt(trial.attempt)
    assert (job.state, job.is_gone) == (JobState.UNKNOWN, is_gone)


def submitted_to(trial: Any, cluster: str | None) -> None:
    record = read_job(trial.attempt)
    assert record is not None
    write_job(trial.attempt, replace(record, cluster=cluster))


@pytest.mark.parametrize("has_comment", [True, False])
def test_another_clusters_job_is_not_ended(slurm: Any, trial: Any, has_comment: bool) -> None:
    submitted_to(trial, "sun")
    slurm.answer("squeue", line(trial.run.path if has_comment else "(null)", age_s=100))
    done = invoke("cancel", "trial")
    assert done.exit_code == 2 and has_parts(done.stderr, "job 12", "cluster sun", "cluster moon")
    assert not slurm.calls("scancel")
    submitted_to(trial, "moon")
    assert invoke("cancel", "trial").exit_code == 0


def test_another_cluster_that_does_not_know_the_job_says_nothing_about_it(slurm: Any, trial: Any) -> None:
    submitted_to(trial, "sun")
    slurm.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    job = query_attempt(trial.attempt)
    assert (job.state, job.is_gone) == (JobState.UNKNOWN, False) and "cluster sun" in job.reason


def test_the_cluster_is_asked_for_its_name_only_if_that_decides(slurm: Any, trial: Any) -> None:
    submitted_to(trial, "moon")
    slurm.answer("squeue", line(trial.run.path))
    assert query_attempt(trial.attempt).state is JobState.RUNNING
    assert not slurm.calls("scontrol")
    slurm.answer("squeue", line())
    assert query_attempt(trial.attempt).state is JobState.RUNNING
    assert len(slurm.calls("scontrol")) == 1


def test_a_later_attempt_with_the_same_id_takes_the_answer(slurm: Any, trial: Any) -> None:
    trial.ended("finished", 0)
    trial.add_attempt("0002")
    slurm.answer("squeue", line(trial.run.path))
    states = {name: job.state for name, job in query_attempts(trial.run.attempts()).items()}
    assert states == {"0001": JobState.COMPLETED, "0002": JobState.RUNNING}


def test_a_job_id_leads_to_the_run_that_it_is_of_now(slurm: Any, make_trial: Any) -> None:
    old = make_trial("old")
    write_job(old.attempt, JobRecord("slurm", old.now - 9000, job_id="12"))
    new = make_trial("new")
    slurm.answer("squeue", line(name="new"))
    document = json.loads(invoke("status", "--jobid", "12", "--json").stdout)
    assert document["run"]["directory"] == str(new.run.path)
    slurm.answer("squeue", line(name="neither"))
    assert json.loads(invoke("status", "--jobid", "12", "--json").stdout)["run"] is None


def test_stacks_of_another_runs_job_are_not_read(slurm: Any, trial: Any, tmp_path: Path) -> None:
    slurm.answer("squeue", line(tmp_path / "runs" / "victim"))
    done = invoke("spy", "trial")
    assert done.exit_code == 4 and has_parts(done.stderr, "job 12", f"{tmp_path}/runs/victim")
