"""Attempts and their jobs: what was submitted, its state, and why it ended.

The state of an attempt has four sources, asked in this order: squeue, sacct if it is installed, the launcher's PID for
local attempts, and the attempt's exit.json. If none of them knows, the state is UNKNOWN, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bigsci_launch.errors import RunDirError, SlurmUnavailable
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json, write_json
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.local import Launcher
from bigsci_launch.scheduler.slurm import query_jobs

SCHEMA_VERSION = 1
STATE_OF_REASON = {
    "finished": JobState.COMPLETED,
    "stopped": JobState.COMPLETED,
    "crashed": JobState.FAILED,
    "launch_failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
    "time_limit": JobState.TIMEOUT,
    "node_failure": JobState.NODE_FAIL,
    "requeued": JobState.REQUEUED,
}


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Contents of `job.json`: how to find the job of an attempt again. `submitted` is seconds since the epoch."""

    scheduler: Literal["slurm", "local"]
    submitted: float
    job_id: str | None = None
    launcher: Launcher | None = None
    total_steps: int | None = None
    """Step at which the run ends; None for programs other than `bsl train`."""

    @property
    def label(self) -> str:
        """The job for people: `job 1234`, or `pid 567 on host`."""
        return f"pid {self.launcher.pid} on {self.launcher.host}" if self.launcher else f"job {self.job_id}"


def write_job(attempt: AttemptDir, record: JobRecord) -> None:
    """Write `job.json`."""
    write_json(attempt.job, {"schema_version": SCHEMA_VERSION, **asdict(record)})


def read_job(attempt: AttemptDir) -> JobRecord | None:
    """Return the job of an attempt, which it shares with its requeues; None if nothing was submitted (yet).

    Raises:
        RunDirError: `job.json` cannot be read, or is not a job record.
    """
    if not attempt.job.exists():
        first = run_of(attempt).attempt(attempt.base_name)
        return read_job(first) if first.name != attempt.name else None
    document = read_json(attempt.job)
    try:
        launcher = document["launcher"]
        return JobRecord(
            scheduler=document["scheduler"],
            submitted=float(document["submitted"]),
            job_id=document["job_id"],
            launcher=Launcher(launcher["pid"], launcher["start_ticks"], launcher["host"]) if launcher else None,
            total_steps=document["total_steps"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirError(f"{attempt.job}: not a job record ({error!r})") from error


def read_exit(attempt: AttemptDir) -> dict[str, Any] | None:
    """Return the contents of `exit.json`; None if the attempt left none, or an incomplete one."""
    try:
        document = read_json(attempt.exit)
    except RunDirError:
        return None
    return document if isinstance(document, dict) and "reason" in document else None


def query_attempt(attempt: AttemptDir) -> JobInfo:
    """Return what is known about the attempt's job, from the first source that knows it. Works without Slurm."""
    return query_attempts([attempt])[attempt.name]


def query_attempts(attempts: Iterable[AttemptDir], *, ask_slurm: bool = True) -> dict[str, JobInfo]:
    """Like `query_attempt`, for several attempts of one run, by name. Slurm is asked once for all."""
    records = {attempt.name: (attempt, read_job(attempt)) for attempt in attempts}
    job_ids = [record.job_id for _, record in records.values() if record and record.job_id]
    jobs, why = ask_about(job_ids) if ask_slurm else ({}, "Slurm was not asked")
    return {name: attempt_state(attempt, record, jobs, why) for name, (attempt, record) in records.items()}


def ask_about(job_ids: Iterable[str]) -> tuple[dict[str, JobInfo], str]:
    """Return what Slurm knows about the jobs, and why the others are unknown."""
    try:
        return query_jobs(job_ids), "the job has left squeue, and sacct has no record of it (or is not installed)"
    except SlurmUnavailable as error:
        return {}, error.message


def attempt_state(attempt: AttemptDir, record: JobRecord | None, jobs: dict[str, JobInfo], why_unknown: str) -> JobInfo:
    """Return the state of one attempt. `jobs` is Slurm's answer; `why_unknown` says why a job is not in it."""
    ended = read_exit(attempt)
    if record is None:
        return unknown("", "nothing was submitted, or `bsl submit` was killed before it could record the job")
    if record.launcher is not None:
        return launcher_state(record.launcher, ended)
    job_id = record.job_id or ""
    if job_id in jobs and is_latest_of_its_job(attempt):
        return jobs[job_id]
    if ended is not None:
        return ended_state(job_id, ended)
    return unknown(job_id, f"{why_unknown}; the attempt left no exit.json")


def launcher_state(launcher: Launcher, ended: dict[str, Any] | None) -> JobInfo:
    """The state of a local attempt."""
    job_id = str(launcher.pid)
    if launcher.is_alive:
        return _local(launcher, JobInfo(job_id, JobState.RUNNING, "RUNNING", "launcher"))
    if ended is not None:
        return _local(launcher, ended_state(job_id, ended))
    if not launcher.is_here:
        return _local(launcher, unknown(job_id, f"it was started on {launcher.host}, and only that machine can tell"))
    return _local(launcher, unknown(job_id, "the launcher is gone and left no exit.json: it was killed"))


def _local(launcher: Launcher, info: JobInfo) -> JobInfo:
    return replace(info, num_nodes=1, hostlist=launcher.host)


def ended_state(job_id: str, ended: dict[str, Any]) -> JobInfo:
    """Return the state that `exit.json` records."""
    reason = str(ended["reason"])
    return JobInfo(
        job_id,
        STATE_OF_REASON.get(reason, JobState.UNKNOWN),
        reason,
        "exit.json",
        reason=str(ended.get("slurm_reason") or ""),
        started=ended.get("started"),
        ends=ended.get("ended"),
    )


def unknown(job_id: str, why: str) -> JobInfo:
    """The answer if no source knows the job."""
    return JobInfo(job_id, JobState.UNKNOWN, "", "none", reason=why)


def is_latest_of_its_job(attempt: AttemptDir) -> bool:
    """Whether no requeue followed: Slurm's answer is about the last start of a job."""
    siblings = (each.name for each in run_of(attempt).attempts() if each.base_name == attempt.base_name)
    return list(siblings)[-1:] == [attempt.name]


def run_of(attempt: AttemptDir) -> RunDir:
    """The run that the attempt belongs to."""
    return RunDir(attempt.path.parent.parent)


def age_s(attempt: AttemptDir) -> float:
    """Return the seconds since the attempt's directory was created or last changed."""
    return time.time() - attempt.path.stat().st_mtime
