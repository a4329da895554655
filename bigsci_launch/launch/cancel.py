"""Ends the queued or running attempt of a run."""

from __future__ import annotations

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.attempts import query_attempt, read_job
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.scheduler.slurm import cancel_job


def cancel_run(run: RunDir) -> str:
    """Ask the scheduler to end the newest attempt. Return in one line what was done.

    Raises:
        RunDirError: no attempt of the run is queued or running.
        SlurmRefused, SlurmUnavailable: scancel failed.
    """
    attempt = run.latest_attempt()
    record = read_job(attempt) if attempt else None
    if attempt is None or record is None:
        raise RunDirError(f"run {run.name}: nothing has been submitted yet")
    job = query_attempt(attempt)
    if job.state.is_over:
        raise RunDirError(f"run {run.name}: attempt {attempt.name} ({record.label}) has ended: {job.state.value}")
    if record.launcher is not None:
        if not record.launcher.is_alive:
            raise RunDirError(f"run {run.name}: attempt {attempt.name} cannot be ended from here: {job.reason}")
        record.launcher.terminate()
    else:
        # Do this for an unknown state too: Slurm decides.
        cancel_job(str(record.job_id))
    return f"{record.label}: asked to end (attempt {attempt.name}); `bsl status {run_argument(run)}` shows its end"
