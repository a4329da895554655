"""Submission: turns a request into files and a job. A submission that fails leaves nothing behind."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

from bigsci_launch.config.load import LoadedRun
from bigsci_launch.config.masking import is_secret
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import RunDirError, SlurmError, SlurmUnanswered, SlurmUnavailable, SubmissionUnknown
from bigsci_launch.launch.claim import new_attempt, require_same_run
from bigsci_launch.launch.freeze import freeze, open_place_notes, require_own_place
from bigsci_launch.launch.job.request import JobRequest, make_request
from bigsci_launch.launch.rehearsed import rehearsal_note
from bigsci_launch.launch.turn import Turn, behind, find_turn, require_silent
from bigsci_launch.runs.attempts import (
    JobRecord,
    adopt_jobs,
    find_job,
    jobs_of_run,
    query_attempt,
    read_exit,
    read_job,
    write_job,
)
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.scheduler.command import has_command
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.local import start_launcher
from bigsci_launch.scheduler.slurm import SubmittedJob, cancel_job, cluster_name, submit_argv, submit_script

MAX_UNKNOWN = 10
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


def submit(loaded: LoadedRun, request: JobRequest, command: Sequence[str], *, force: bool = False) -> Submission:
    """Create the attempt's directory, freeze everything in it, and start the request. With `force`, an attempt that may
    still run elsewhere, and gives no sign of life, counts as ended.

    Raises:
        RunDirError: the run has an active attempt and the next one may not wait, belongs to another model, is where
            others could exchange it, or cannot be written.
        SlurmUnavailable, SlurmRefused: sbatch failed. Nothing is left of the attempt.
        SubmissionUnknown: sbatch got no answer. The attempt stays, because it may have a job.
    """
    try:
        return _submit(loaded, request, command, force=force)
    except OSError as error:
        raise _cannot_write(request, error) from error


def _submit(loaded: LoadedRun, request: JobRequest, command: Sequence[str], *, force: bool) -> Submission:
    require_own_place(request.run)
    require_same_run(request.run, loaded.config, request.topology)
    if request.scheduler == "slurm":
        adopt_jobs(request.run)
    if force:
        require_silent(request.run)
    turn = find_turn(request.run, request.chain, force=force)
    submission = _start_attempt(loaded, request if turn is None else behind(request, turn), command)
    chain = request.chain
    if chain is None or chain.by != "queue":
        return submission
    return queue_links(loaded, submission, turn, command)


def _start_attempt(loaded: LoadedRun, request: JobRequest, command: Sequence[str]) -> Submission:
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


def queue_links(loaded: LoadedRun, submission: Submission, turn: Turn | None, command: Sequence[str]) -> Submission:
    """Submit attempts behind the one of `submission` until as many wait as the chain wants. Those that Slurm accepted
    are kept if it refuses one. `turn` is what the first one waits for."""
    first, chain, successors = submission.request, submission.request.chain, list[JobRecord]()
    assert chain is not None
    turn = after(turn, submission)
    while turn.num_waiting < chain.links and turn.num_starts < chain.max_starts:
        following = make_request(
            loaded,
            run=first.run,
            attempt=first.run.next_attempt_name(),
            working_directory=first.working_directory,
            python=first.host_python,
            local=False,
        )
        following = replace(following, accepted=first.accepted)
        try:
            queued = _start_attempt(loaded, behind(following, turn), command)
        except (OSError, SlurmError) as error:
            return replace(submission, successors=tuple(successors), refused=str(error))
        successors.append(queued.record)
        turn = after(turn, queued)
    return replace(submission, successors=tuple(successors))


def after(turn: Turn | None, submission: Submission) -> Turn:
    """Return the place behind an attempt that was just submitted, and behind all that it waits for."""
    attempt, job_id = submission.request.attempt, str(submission.record.job_id)
    if turn is None:
        return Turn(attempt, (job_id,), num_starts=1, num_waiting=0)
    return Turn(attempt, (*turn.jobs, job_id), turn.num_starts + 1, turn.num_waiting + 1)


def start(request: JobRequest) -> Submission:
    """Pass the attempt's script to its scheduler."""
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
            f"{error.message}; the job may be in the queue all the same",
            hint=f"`bsl status {run_argument(request.run)}` finds it when Slurm answers again; "
            "another `bsl submit` starts no second job before that is known",
        ) from error
    except KeyboardInterrupt:
        with suppress(SlurmError):
            if (job_id := find_accepted(request.attempt, time.monotonic())) is not None:
                cancel_job(job_id)
        raise


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
            f"run {run.name}: job {', '.join(others)} in the queue belongs to this run, and no attempt records it",
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
    """End a job that could not be recorded, because nobody would find it again."""
    if submission.record.job_id is not None:
        cancel_job(submission.record.job_id)
    if submission.process is not None:
        submission.process.terminate()
        submission.process.wait()


def _cannot_write(request: JobRequest, error: OSError) -> RunDirError:
    if isinstance(error, FileExistsError) and error.filename == str(request.attempt.path):
        return RunDirError(
            f"run {request.name}: attempt {request.attempt.name} is being submitted by another process",
            hint=f"`bsl status {run_argument(request.run)}` shows it",
        )
    where = error.filename or request.run.path
    room = "make room, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    # A run that has begun would begin again in another root.
    remedy = "see that it can be written" if request.run.record.exists() else "set run.root to another folder"
    return RunDirError(f"{where}: {error.strerror or error}", hint=f"{room}{remedy}")


def dry_run_notes(request: JobRequest) -> list[str]:
    """Return what differs between a dry run and a submission on this machine."""
    if request.scheduler == "local" or has_command("sbatch"):
        return []
    return ["there is no sbatch here: without --dry-run, the run would be refused"]


def notes(loaded: LoadedRun, *, is_local: bool) -> list[str]:
    """Return what the user should know before the run is started, line by line."""
    found = [
        f"warning: env.{name}: its value will be stored in the run directory, where your group may read it; "
        f"write `{name}: {{from: environment, reason: ...}}`, and set {name} where you call `bsl submit`"
        for name, variable in loaded.config.env.items()
        if variable.value and is_secret(name, variable.value)
    ]
    found += _shared_place(loaded.config)
    found += _missing_webhook(loaded.config)
    found += [*_missing_data(loaded.config), *(() if is_local else _missing_files(loaded.config))]
    found += [] if is_local else rehearsal_note(loaded, Path.cwd())
    if not is_local or loaded.site.is_local:
        return found
    ranks = loaded.layout.topology.world_size
    left_out = [name for name in ("activation", "container") if getattr(loaded.site.config, name)]
    without = f", without the {' and '.join(left_out)} of site {loaded.site.name}" if left_out else ""
    return [*found, f"starting {ranks} ranks on this machine{without}"]


def _shared_place(config: RunConfig) -> list[str]:
    """Return warnings for a run that is new, if others may rename what leads to it."""
    run = RunDir((Path.cwd() / config.run.root / config.run.name).resolve())
    return [] if run.record.exists() else open_place_notes(run)


def _missing_webhook(config: RunConfig) -> Iterator[str]:
    """Yield a warning if the variable that holds the URL of a webhook is not set. It may be set later, for `bsl watch`
    on another machine."""
    notify = config.monitor.notify
    if notify is not None and (name := notify.webhook_variable) and not os.environ.get(name):
        yield f"warning: monitor.notify.webhook_variable: {name} is not set here, so the job will not know the URL"


def _missing_data(config: RunConfig) -> Iterator[str]:
    """Yield a warning if the dataset is missing. It is not an error, since only the compute nodes must see the
    files."""
    names = (f"{config.data.prefix}.bin", f"{config.data.prefix}.idx") if config.run.starts_trainer else ()
    for name in names:
        if not Path(name).exists():
            yield (
                f"warning: data.prefix: {name}: this machine sees no such file; "
                f"`bsl data prepare DIR --output {config.data.prefix}` makes a dataset"
            )
            return


def _missing_files(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each file to stage that is missing here. The job's first node copies it, not this machine."""
    for item in config.slurm.stage_in:
        if not Path(item.file).exists():
            yield f"warning: slurm.stage_in: {item.file}: this machine sees no such file"


def exit_of(submission: Submission) -> dict[str, Any] | None:
    """Return why the newest attempt of the submission's job ended (a requeue is a new attempt)."""
    attempt = submission.request.run.latest_attempt()
    return read_exit(attempt) if attempt else None


def exit_code_of(submission: Submission, job: JobInfo) -> int:
    """Return the exit code of the training; 1 if the job failed without one, 4 if its state is unknown."""
    code = (exit_of(submission) or {}).get("exit_code")
    if job.state is JobState.UNKNOWN and code is None:
        return 4
    is_good = job.state is JobState.COMPLETED
    return 0 if is_good else int(code or 1)


def wait_for_end(run: RunDir, tell: Callable[[JobInfo], None]) -> JobInfo:
    """Wait until the job of the run's newest attempt ends. Query it after 2, 4, 8 and 16 s, then every 30 s.

    `tell` is called with each new state. The state UNKNOWN (slurmctld is being restarted) is tolerated for minutes.
    """
    pause_s, last, num_unknown = 1.0, None, 0
    while True:
        attempt = run.latest_attempt()
        assert attempt is not None, "the attempt has just been made"
        job = query_attempt(attempt)
        if job.state is not last:
            tell(job)
            last = job.state
        num_unknown = num_unknown + 1 if job.state is JobState.UNKNOWN else 0
        if job.state.is_over or num_unknown >= MAX_UNKNOWN:
            return job
        pause_s = min(pause_s * 2, 30.0)
        time.sleep(pause_s)
