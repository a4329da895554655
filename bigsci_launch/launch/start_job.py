"""Starts one attempt: its folder is frozen, and its job is submitted, or found again if sbatch got no answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import Popen

from bigsci_launch.config.load import LoadedRun
from bigsci_launch.errors import (
    RunDirError,
    SlurmError,
    SlurmRefused,
    SlurmUnanswered,
    SlurmUnavailable,
    SubmissionUnknown,
)
from bigsci_launch.launch.claim import new_attempt
from bigsci_launch.launch.freeze import freeze
from bigsci_launch.launch.job.request import JobRequest
from bigsci_launch.runs.attempts import JobRecord, find_job, jobs_of_run, read_job, write_job
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.scheduler.local import start_launcher
from bigsci_launch.scheduler.slurm import SubmittedJob, cancel_job, cluster_name, submit_argv, submit_script

LOOK_S, LOOK_PAUSE_S = 20.0, 1.0
"""For how long, and how often, a job is looked for if sbatch got no answer."""


@dataclass(frozen=True, slots=True)
class Submission:
    """An attempt that was started: its request, its job, and the launcher process of a local attempt."""

    request: JobRequest
    record: JobRecord
    process: Popen[bytes] | None = None
    successors: tuple[JobRecord, ...] = ()
    """The jobs of the attempts that wait behind this one, for a chain by queue."""
    refused: str = ""
    """Why no further attempt could be queued."""


def start_attempt(loaded: LoadedRun, request: JobRequest, command: Sequence[str]) -> Submission:
    """Create the directory of one attempt, freeze everything in it, and start it. On failure, nothing is left of it.

    Raises:
        OSError: the attempt cannot be written. RunDirError: a job of the run has no attempt.
        SlurmUnavailable, SlurmRefused: sbatch failed.
        SubmissionUnknown: sbatch got no answer. The attempt stays, because it may have a job.
    """
    with new_attempt(request, loaded.config):
        freeze(request, loaded, command)
        if request.scheduler == "slurm":
            require_no_other_job(request.run)
        submission = start(request)
        try:
            write_job(request.attempt, submission.record)
        except BaseException:
            take_back(submission)
            raise
    return submission


def start(request: JobRequest) -> Submission:
    if request.scheduler == "slurm":
        return Submission(request, slurm_record(request, submit_job(request)))
    launcher, process = start_launcher(request.attempt.script, request.attempt.job_output, request.working_directory)
    record = JobRecord("local", time.time(), launcher=launcher, total_steps=request.total_steps)
    return Submission(request, record, process)


def submit_job(request: JobRequest) -> SubmittedJob:
    """Pass the script to sbatch. If its answer is lost, look for the job: Slurm may have accepted it.

    Raises:
        SlurmUnavailable, SlurmRefused: there is no job.
        SubmissionUnknown: there may be one.
    """
    options = {option.variable: option.value for option in request.caller_options if option.applies}
    try:
        return submit_script(submit_argv(request.attempt.script), cwd=request.working_directory, options=options)
    except SlurmUnanswered as error:
        job_id = find_accepted(request.attempt, time.monotonic() + LOOK_S)
        if job_id is not None:
            return SubmittedJob(job_id, cluster_name(), (f"{error.message}; but squeue shows job {job_id}",))
        raise SubmissionUnknown(
            f"{error.message}; the job may still be in the queue",
            hint=f"`bsl status {run_argument(request.run)}` finds it when Slurm answers again; "
            "until then, `bsl submit` starts no second job",
        ) from error
    except SlurmRefused as error:
        if is_expedition_refused(request, error.stderr):
            error.hint = (
                "set slurm.requeue to true: expedited requeues need Slurm 25.11 or newer, and a site that "
                "allows them (SlurmctldParameters=enable_expedited_requeue)"
            )
        elif "temporarily unable to accept job" in error.stderr:
            error.hint = "the cluster has as many jobs as it may (MaxJobCount): submit it again later"
        raise
    except KeyboardInterrupt:
        with suppress(SlurmError):
            if (job_id := find_accepted(request.attempt, time.monotonic())) is not None:
                cancel_job(job_id)
        raise


def is_expedition_refused(request: JobRequest, words: str) -> bool:
    """Whether sbatch refuses `--requeue=expedite`: it knows no such value, or the site does not allow it."""
    is_wanted = request.chain is not None and request.chain.is_expedited
    return is_wanted and ("'--requeue'" in words or "not supported on this system" in words)


def find_accepted(attempt: AttemptDir, deadline: float) -> str | None:
    """Return the job that Slurm has accepted for an attempt; None if squeue shows none until `deadline`.

    One that slurmctld has just been sent may come later than an answer of squeue.
    """
    while True:
        with suppress(SlurmUnavailable):
            if (record := find_job(attempt)) is not None:
                return record.job_id
        if time.monotonic() >= deadline:
            return None
        time.sleep(LOOK_PAUSE_S)


def require_no_other_job(run: RunDir) -> None:
    """Raise RunDirError if a job of the run waits or runs that no attempt records: two of them would train at once.

    To be called after the new attempt was made. An earlier one's job that starts later sees it, and does not run.
    """
    recorded = {record.job_id for each in (*run.attempts(), *run.queued_attempts()) if (record := read_job(each))}
    others = [job.job_id for job in jobs_of_run(run) if job.job_id not in recorded]
    if others:
        raise RunDirError(
            f"run {run.name}: job {', '.join(others)} in the queue belongs to this run, but no attempt records it",
            hint=f"`scontrol show job {others[0]}` shows it; `scancel {others[0]}` ends it",
        )


def slurm_record(request: JobRequest, job: SubmittedJob) -> JobRecord:
    """Return the record of a job that sbatch has just accepted."""
    requeue = [option.name == "requeue" for option in request.options if option.name in ("requeue", "no-requeue")]
    return JobRecord(
        "slurm",
        time.time(),
        job_id=job.job_id,
        total_steps=request.total_steps,
        cluster=job.cluster,
        requeue=requeue[-1] if requeue else None,
        said=job.said,
    )


def take_back(submission: Submission) -> None:
    """End a job that could not be recorded: it could not be found again."""
    if submission.record.job_id is not None:
        cancel_job(submission.record.job_id)
    if submission.process is not None:
        submission.process.terminate()
        submission.process.wait()
