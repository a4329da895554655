"""Ending the attempt of a run that is queued or running."""

from __future__ import annotations

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.attempts import query_attempt, read_job
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.scheduler.slurm import cancel_job


def cancel_run(run: RunDir) -> str:
    """Ask the scheduler to end the newest attempt; what was done, in one line.

    Raises:
        RunDirError: nothing of the run is queued or running; SlurmRefused, SlurmUnavailable: as scancel says.
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
        # Also where nobody knows the state: Slurm has the last word.
        cancel_job(str(record.job_id))
    return f"{record.label}: asked to end (attempt {attempt.name}); `bsl status {run_argument(run)}` shows when it has"
