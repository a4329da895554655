"""Ends the queued or running attempt of a run, and never another user's job."""

from __future__ import annotations

import shutil
from contextlib import suppress

from bigsci_launch.errors import JobNotFound, RunDirError, SlurmRefused
from bigsci_launch.runs.attempts import JobRecord, ask_about, attempt_state, find_job, identify, query_attempt
from bigsci_launch.runs.find import find_run_of_job, run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.runs.ownership import require_own_run
from bigsci_launch.safe_files import write_file
from bigsci_launch.scheduler.job_ids import ended_as
from bigsci_launch.scheduler.slurm import cancel_job, jobs_called


def cancel_run(run: RunDir) -> str:
    """Ask the scheduler to end the newest attempt, and those that wait behind it. Return what was done.

    The attempt is marked, so that it does not start itself again.

    Raises:
        RunDirError: no attempt of the run is queued or running, the job or the process may not be this run's, or the
            run belongs to another user.
        SlurmRefused, SlurmUnavailable: scancel failed.
    """
    _require_own(run)
    waiting = _cancel_queued(run)
    try:
        return "\n".join([*waiting, _cancel_newest(run)])
    except RunDirError:
        if not waiting:
            raise
        return "\n".join(waiting)  # the attempt before it has ended


def _require_own(run: RunDir) -> None:
    require_own_run(run, "cancel it", f"`bsl control {run_argument(run)} exit --why TEXT` asks its watcher to end it")


def would_end(run: RunDir) -> tuple[str, ...]:
    """Return the attempts that `cancel_run` would try to end, each with its job.

    Raises:
        RunDirError: none is queued or running, as far as is known, or the run belongs to another user.
    """
    _require_own(run)
    attempts = [*reversed(run.queued_attempts()), *filter(None, [run.latest_attempt()])]
    jobs = [(attempt, record) for attempt in attempts if (record := find_job(attempt)) is not None]
    found = tuple(f"attempt {attempt.name}, {job.label}" for attempt, job in jobs if not _is_over(attempt))
    if not found:
        raise RunDirError(f"run {run.name}: nothing is queued or running")
    return found


def _is_over(attempt: AttemptDir) -> bool:
    return query_attempt(attempt).state.is_over


def cancel_called(job_id: str) -> str:
    """Ask Slurm to end the job with this ID, in any spelling that squeue prints; of a run, as `cancel_run`.

    Raises:
        JobNotFound: there is no such job. RunDirError: it is that of an attempt that another has followed.
        SlurmRefused: it has ended; SlurmRefused, SlurmUnavailable: scancel failed.
    """
    jobs = jobs_called(job_id)
    if jobs[0].run_directory is not None:
        return cancel_run(_run_of_newest(job_id, jobs[0].number))
    if all(job.state.is_over for job in jobs):
        raise SlurmRefused(f"job {job_id} has ended: {jobs[0].state.value}")
    cancel_job(ended_as(job_id, jobs[0]))
    return f"job {job_id}, which bsl did not submit: cancel requested"


def _run_of_newest(job_id: str, number: str) -> RunDir:
    """Return the run whose newest attempt, or one that waits behind it, is the job `number`."""
    run = find_run_of_job(job_id)
    attempts = [*run.queued_attempts(), *filter(None, [run.latest_attempt()])]
    if not any((record := find_job(attempt)) and record.job_id == number for attempt in attempts):
        raise RunDirError(
            f"job {job_id} does not belong to the newest attempt of run {run.name}",
            hint=f"`bsl cancel {run_argument(run)}` ends the newest",
        )
    return run


def _cancel_queued(run: RunDir) -> list[str]:
    """End the attempts that wait behind the newest one first, the last of them first: they would start."""
    said = []
    for attempt in reversed(run.queued_attempts()):
        record = find_job(attempt)
        if record is None:
            continue
        with suppress(JobNotFound):
            answer = ask_about([record], needs_cluster=record.cluster is not None)
            if not attempt_state(attempt, record, answer).state.is_over:
                _require_own_job(run, attempt, record)
                cancel_job(str(record.job_id))
                said.append(f"{record.label}: cancel requested (attempt {attempt.name}, which has not started)")
        shutil.rmtree(attempt.path, ignore_errors=True)
    return said


def _cancel_newest(run: RunDir) -> str:
    attempt = run.latest_attempt()
    if attempt is None:
        raise RunDirError(f"run {run.name}: nothing has been submitted yet")
    record = find_job(attempt)
    if record is None:
        job = query_attempt(attempt)
        why = f"has ended: {job.state.value}" if job.state.is_over else f"was not cancelled: {job.reason}"
        raise RunDirError(f"run {run.name}: attempt {attempt.name} {why}")
    if record.launcher is None:
        _require_own_job(run, attempt, record)
        _mark(attempt)
        cancel_job(str(record.job_id))
    else:
        _end_launcher(run, attempt, record)
    return f"{record.label}: cancel requested (attempt {attempt.name}); `bsl status {run_argument(run)}` shows its end"


def _end_launcher(run: RunDir, attempt: AttemptDir, record: JobRecord) -> None:
    job = query_attempt(attempt)
    if job.state.is_over:
        raise RunDirError(f"run {run.name}: attempt {attempt.name} ({record.label}) has ended: {job.state.value}")
    if record.launcher is None or not record.launcher.is_alive:
        raise RunDirError(f"run {run.name}: attempt {attempt.name} cannot be cancelled from here: {job.reason}")
    if (why := record.launcher.why_not_of(attempt.path)) is not None:
        here = f"run {run.name}: attempt {attempt.name} was not cancelled"
        raise RunDirError(f"{here}: {record.label}: {why}", hint=f"`ps -fp {record.launcher.pid}` shows that process")
    _mark(attempt)
    record.launcher.terminate(attempt.path)


def _mark(attempt: AttemptDir) -> None:
    """Note that the attempt was ended on request, so that it does not start itself again. The disk may be full."""
    with suppress(OSError):
        write_file(attempt.cancel_mark, "bsl cancel\n")


def _require_own_job(run: RunDir, attempt: AttemptDir, record: JobRecord) -> None:
    answer = ask_about([record], needs_cluster=record.cluster is not None)
    state, job = attempt_state(attempt, record, answer), answer.about(record.job_id)
    who = identify(attempt, record, job) if job else None
    here = f"run {run.name}: attempt {attempt.name}"
    if who is not None and who.is_ours is False:
        ended = f"; the attempt has ended: {state.state.value}" if state.state.is_over else ""
        shown = f"`bsl status --jobid {record.job_id}` shows that job"
        raise RunDirError(f"{here} was not cancelled: {who.why}{ended}", hint=shown)
    if state.state.is_over:
        raise RunDirError(f"{here} ({record.label}) has ended: {state.state.value}")
    if who is None:
        raise RunDirError(f"{here} was not cancelled: {state.reason}", hint=_by_hand(record))
    if who.is_ours is None:
        why = f"cannot determine whose job this is: {who.why}"
        raise RunDirError(f"{here} was not cancelled: {why}", hint=_by_hand(record))


def _by_hand(record: JobRecord) -> str:
    where = f" on cluster {record.cluster}" if record.cluster else ""
    return (
        f"`scontrol show job {record.job_id}`{where} shows the job; if it is yours, `scancel {record.job_id}` ends it"
    )
