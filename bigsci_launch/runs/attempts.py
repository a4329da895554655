"""Attempts and their jobs: what was submitted, its state, and why it ended.

The state of an attempt has four sources, asked in this order: squeue, sacct if it is installed, the launcher's PID for
local attempts, and the attempt's exit.json. If none of them knows, the state is UNKNOWN, with the reason.
An attempt without job.json may have a job: `bsl submit` was killed, or sbatch got no answer. squeue knows its script.
Slurm's answer is believed only if it can be about this attempt's job: an id alone proves nothing.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bigsci_launch.errors import BslError, RunDirError, SlurmError, SlurmUnavailable
from bigsci_launch.runs.ending.job_output import read_printed_exit
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json, write_json
from bigsci_launch.runs.ownership import Identification, identify_job, is_same_folder, owner_of
from bigsci_launch.runs.record_types import record_of
from bigsci_launch.safe_files import read_file
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.lease import renewed_at
from bigsci_launch.scheduler.local import Launcher
from bigsci_launch.scheduler.slurm import (
    ONLY_OWN_JOBS,
    ClusterFacts,
    QueuedScript,
    cluster_facts,
    query_jobs,
    queued_scripts,
)
from bigsci_launch.units import ago

SCHEMA_VERSION = 1
NO_RECORD = "`bsl submit` recorded no job"
NO_JOB = f"{NO_RECORD}, and no queued or running job has the script of this attempt"
STATE_OF_REASON = {
    "finished": JobState.COMPLETED,
    "stopped": JobState.COMPLETED,
    "crashed": JobState.FAILED,
    "launch_failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
    "time_limit": JobState.TIMEOUT,
    "node_failure": JobState.NODE_FAIL,
    "requeued": JobState.REQUEUED,
    "preempted": JobState.PREEMPTED,
    "not_started": JobState.FAILED,
    "left_early": JobState.FAILED,
    "hung_at_exit": JobState.FAILED,
    "hang": JobState.FAILED,
    "node_check": JobState.FAILED,
    "out_of_memory": JobState.OUT_OF_MEMORY,
    "unknown": JobState.FAILED,
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
    cluster: str | None = None
    """Name of the Slurm cluster; None if no command said it, and in records of older versions."""
    requeue: bool | None = None
    """Whether Slurm may restart the job; None for local attempts, and in records of older versions."""
    said: tuple[str, ...] = ()
    """What sbatch said when it accepted the job, such as a site's warning about the account."""

    @property
    def label(self) -> str:
        """The job for people: `job 1234`, or `pid 567 on host`."""
        return f"pid {self.launcher.pid} on {self.launcher.host}" if self.launcher else f"job {self.job_id}"


def write_job(attempt: AttemptDir, record: JobRecord) -> None:
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
        if not isinstance(document["job_id"], str | None):
            raise TypeError("its job_id is no text")
        return JobRecord(
            scheduler=document["scheduler"],
            submitted=float(document["submitted"]),
            job_id=document["job_id"],
            launcher=Launcher(launcher["pid"], launcher["start_ticks"], launcher["host"]) if launcher else None,
            total_steps=document["total_steps"],
            cluster=document.get("cluster"),
            requeue=document.get("requeue"),
            said=tuple(document.get("said") or ()),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunDirError(f"{attempt.job}: not a job record ({error!r})") from error


def find_job(attempt: AttemptDir) -> JobRecord | None:
    """Like `read_job`, but an attempt without a record is looked for in the queue while it has not ended.

    Raises:
        RunDirError: as `read_job`.
        SlurmError: squeue gave no answer.
    """
    record = read_job(attempt)
    if record is not None or not _is_for_slurm(attempt) or _is_concluded(attempt):
        return record
    return next((_as_record(attempt, job) for job in jobs_of_run(run_of(attempt)) if _starts(job, attempt)), None)


def adopt_jobs(run: RunDir) -> None:
    """Record the jobs in the queue of attempts whose submission was killed, or got no answer, before it could do so.

    Raises:
        RunDirError: a record cannot be read; OSError: one cannot be written.
        SlurmError: squeue gave no answer.
    """
    lost = [each for each in (*run.attempts(), *run.queued_attempts()) if read_job(each) is None]
    for job in jobs_of_run(run) if lost else ():
        if attempt := next((each for each in lost if _starts(job, each)), None):
            write_job(attempt, _as_record(attempt, job))


def jobs_of_run(run: RunDir) -> list[QueuedScript]:
    """Return the jobs that wait or run and belong to the run, recorded or not: by their script, or by their comment.

    Raises:
        SlurmError: squeue gave no answer.
    """
    jobs = queued_scripts(os.getuid(), *_owner_of(run.path))
    return [
        job
        for job in jobs
        if run.attempts_folder in job.script.parents
        or (job.run_directory is not None and is_same_folder(Path(job.run_directory), run.path))
    ]


def _owner_of(folder: Path) -> Iterator[int]:
    """Yield the owner of a folder, unless this machine does not know the number: squeue would refuse it."""
    with suppress(OSError, KeyError):
        yield pwd.getpwuid(folder.stat().st_uid).pw_uid


def _is_for_slurm(attempt: AttemptDir) -> bool:
    """Whether the attempt's script is one for sbatch, rather than for the local launcher."""
    try:
        return b"\n#SBATCH " in read_file(run_of(attempt).attempt(attempt.base_name).script)
    except OSError:
        return False


def _starts(job: QueuedScript, attempt: AttemptDir) -> bool:
    """Whether a job of the run is that of the attempt: another path may lead to the same folder."""
    return job.script.parts[-2:] == (attempt.base_name, attempt.script.name)


def _as_record(attempt: AttemptDir, job: QueuedScript) -> JobRecord:
    steps = None
    with suppress(BslError):
        from bigsci_launch.config.load import load_resolved  # the schema takes most of the start of a command

        config = load_resolved(attempt.config)
        steps = config.training.steps if config.run.starts_trainer else None
    return JobRecord("slurm", time.time() - age_s(attempt), job_id=job.job_id, total_steps=steps)


def _is_concluded(attempt: AttemptDir) -> bool:
    ended = read_exit(attempt)
    return ended is not None and ended.get("exit_code") is not None


def read_exit(attempt: AttemptDir) -> dict[str, Any] | None:
    """Return the contents of `exit.json`; None if the attempt left none, or an incomplete one.

    The batch script prints the record if it cannot write it: the disk is full.
    """
    try:
        document = record_of(read_json(attempt.exit))
    except RunDirError:
        document = {}
    known = document if document.get("reason") else None
    is_final = known is not None and known.get("exit_code") is not None
    return known if is_final else read_printed_exit(attempt) or known


@dataclass(frozen=True, slots=True)
class SlurmAnswer:
    """What Slurm knows about some jobs, by id, and why the others are unknown.

    `has_answered` is False if Slurm was not asked or did not answer. `cluster` is what is known of the one that did,
    if that was needed.
    """

    jobs: Mapping[str, JobInfo] = field(default_factory=dict)
    why_unknown: str = "Slurm was not queried"
    has_answered: bool = False
    cluster: ClusterFacts = field(default_factory=ClusterFacts)

    def about(self, job_id: str | None) -> JobInfo | None:
        """Return Slurm's answer about a job, with the cluster that gave it; None if there is none."""
        job = self.jobs.get(job_id or "")
        return replace(job, cluster=job.cluster or self.cluster.name or "") if job else None


def query_attempt(attempt: AttemptDir) -> JobInfo:
    """Return what is known about the attempt's job, from the first source that knows it. Works without Slurm."""
    return query_attempts([attempt])[attempt.name]


def query_attempts(attempts: Iterable[AttemptDir], *, ask_slurm: bool = True) -> dict[str, JobInfo]:
    """Like `query_attempt`, for several attempts of one run, by name. Slurm is asked once for all."""
    found = {attempt.name: (attempt, *_look_up(attempt, ask_slurm=ask_slurm)) for attempt in attempts}
    answer = ask_about(record for _, record, _ in found.values()) if ask_slurm else SlurmAnswer()
    return {name: attempt_state(attempt, record, answer, why) for name, (attempt, record, why) in found.items()}


def _look_up(attempt: AttemptDir, *, ask_slurm: bool) -> tuple[JobRecord | None, str]:
    """Return the job of an attempt; without one, why it is not known whether there is one."""
    try:
        return (find_job(attempt) if ask_slurm else read_job(attempt)), NO_JOB
    except SlurmError as error:
        return None, f"{NO_RECORD}; {error.message}"


def ask_about(records: Iterable[JobRecord | None], *, needs_cluster: bool = False) -> SlurmAnswer:
    """Return what Slurm knows about the jobs, and its cluster's name if that may decide, or with `needs_cluster`."""
    asked = [record for record in records if record is not None and record.job_id]
    try:
        jobs = query_jobs({record.job_id: record.cluster for record in asked if record.job_id})
    except SlurmUnavailable as error:
        return SlurmAnswer(why_unknown=error.message)
    found = [(record.cluster, jobs.get(record.job_id or "")) for record in asked]
    is_open = needs_cluster or any(job is None or (cluster and not job.run_directory) for cluster, job in found)
    why = "the job has left squeue, and sacct has no record of it (or is not installed)"
    return SlurmAnswer(jobs, why, has_answered=True, cluster=cluster_facts() if asked and is_open else ClusterFacts())


def identify(attempt: AttemptDir, record: JobRecord, job: JobInfo) -> Identification:
    """Return whether `job`, which Slurm knows by the id of the attempt's job, is that job."""
    if not is_latest_of_its_job(attempt, record):
        return Identification(False, f"job {job.job_id} now belongs to a later attempt")
    return identify_job(attempt, record.submitted, record.cluster, job)


def attempt_state(
    attempt: AttemptDir, record: JobRecord | None, answer: SlurmAnswer, why_no_record: str = NO_RECORD
) -> JobInfo:
    """Return the state of one attempt, given Slurm's answer about its job."""
    ended = read_exit(attempt)
    if record is None and ended is not None:
        return ended_state(str(ended.get("job_id") or ""), ended)
    if record is None:
        return unknown("", why_no_record)
    if record.launcher is not None:
        return launcher_state(attempt, record.launcher, ended)
    job_id, job = record.job_id or "", answer.about(record.job_id)
    who = identify(attempt, record, job) if job else None
    if job is not None and who is not None and who.is_ours is not False:
        return job
    if ended is not None:
        return ended_state(job_id, ended)
    left = "the attempt left no exit.json"
    if who is not None:
        return unknown(job_id, f"{who.why}; {left}")
    asked = answer.cluster.name
    if record.cluster and asked and record.cluster != asked:
        return unknown(job_id, f"it is on cluster {record.cluster}, but only cluster {asked} was queried; {left}")
    if answer.cluster.hides_jobs and owner_of(attempt.run) != os.geteuid():
        return unknown(job_id, ONLY_OWN_JOBS)
    return replace(unknown(job_id, f"{answer.why_unknown}; {left}"), is_gone=answer.has_answered)


def launcher_state(attempt: AttemptDir, launcher: Launcher, ended: dict[str, Any] | None) -> JobInfo:
    job_id = str(launcher.pid)
    if launcher.is_alive:
        return _local(launcher, JobInfo(job_id, JobState.RUNNING, "RUNNING", "launcher"))
    if ended is not None:
        return _local(launcher, ended_state(job_id, ended))
    if not launcher.is_here:
        why = f"its launcher was started on {launcher.host} and can only be checked there; {_lease_text(attempt)}"
        return _local(launcher, unknown(job_id, why))
    killed = unknown(job_id, "the launcher is gone and left no exit.json: it was killed, or could not write it")
    return _local(launcher, replace(killed, is_gone=True))


def _lease_text(attempt: AttemptDir) -> str:
    """Return when the launcher last showed that it runs. The clock that wrote that may be another than ours."""
    renewed = renewed_at(attempt.lease)
    if renewed is None:
        return "it has written no heartbeat"
    return f"its last heartbeat was {ago(renewed, time.time())}"


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


def is_latest_of_its_job(attempt: AttemptDir, record: JobRecord) -> bool:
    """Whether no later start has the same job: Slurm's answer is about the last start of a requeued job.

    A later attempt may have the same id too, if the cluster has begun to count again.
    """
    for later in reversed(run_of(attempt).attempts()):
        if later.name == attempt.name:
            return True
        with suppress(RunDirError):
            other = read_job(later)
            if other is not None and (other.job_id, other.cluster) == (record.job_id, record.cluster):
                return False
    return True


def run_of(attempt: AttemptDir) -> RunDir:
    return RunDir(attempt.path.parent.parent)


def age_s(attempt: AttemptDir) -> float:
    """Return the seconds since the attempt was made: since its script was written, or else its directory changed."""
    made = attempt.script if attempt.script.exists() else attempt.path
    return time.time() - made.stat().st_mtime
