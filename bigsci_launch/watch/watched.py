"""What is watched: a run of `bsl` with its newest attempt, or a Slurm job or a launcher that `bsl` did not start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.config.load import load_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import BslError, RunDirError
from bigsci_launch.runs.attempts import read_job
from bigsci_launch.runs.find import find_run, run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.scheduler.choice import HERE
from bigsci_launch.scheduler.slurm import query_job, query_output
from bigsci_launch.spy.look.target import state_folder


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """`home` is where the ledger is kept: the run, or a folder of the user for a job that is not a run of `bsl`.

    `log` is the only source for such a job; None if Slurm does not say where its output goes. `pid` is a launcher on
    this machine.
    """

    home: RunDir
    run: RunDir | None
    attempt: AttemptDir | None
    job_id: str | None
    log: Path | None = None
    config: RunConfig | None = None
    pid: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether the ranks are processes of the local launcher, or of another one on this machine."""
        return self.pid is not None or (self.run is not None and self.job_id is None)

    @property
    def is_gone(self) -> bool:
        """Whether the attempt was removed. A file system that does not answer does not show that."""
        if self.attempt is None:
            return False
        try:
            self.attempt.config.stat()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False

    @property
    def name(self) -> str:
        if self.run is not None:
            return self.run.name
        return f"process {self.pid}" if self.pid is not None else f"job {self.job_id}"

    @property
    def argument(self) -> str:
        """How to name it on the command line."""
        if self.run is not None:
            return run_argument(self.run)
        return f"--pid {self.pid}" if self.pid is not None else f"--jobid {self.job_id}"


def find_watched(argument: str | None, job_id: str | None, pid: int | None = None) -> WatchedRun:
    """Return what a person wants to have watched.

    Raises:
        RunDirError: there is no such run, or nothing was submitted.
        JobNotFound, SlurmUnavailable: there is no such job.
        CollectError: there is no such process.
    """
    if pid is not None:
        HERE.find_job(str(pid))
        home = RunDir(state_folder(os.environ) / "watch" / f"pid-{pid}")
        return WatchedRun(home, None, None, None, log=_output_of(pid), pid=pid)
    try:
        return watched_run(find_run(argument, job_id))
    except RunDirError:
        if job_id is None:
            raise
        job = query_job(job_id)
        if job.run_directory is not None:
            raise
    folder = state_folder(os.environ) / "watch" / f"job-{job_id}"
    return WatchedRun(RunDir(folder), None, None, job_id, log=query_output(job.number))


def _output_of(pid: int) -> Path | None:
    """Return the file that a process writes its output to; None if it is no file, or cannot be seen."""
    try:
        path = Path(f"/proc/{pid}/fd/1").readlink()
        return path if path.is_file() else None
    except OSError:
        return None


def watched_run(run: RunDir) -> WatchedRun:
    """Return the run with its newest attempt.

    Raises:
        RunDirError: nothing was submitted yet.
    """
    attempt = run.latest_attempt()
    if attempt is None:
        raise RunDirError(f"run {run.name}: nothing has been submitted yet")
    record = read_job(attempt)
    return WatchedRun(run, run, attempt, record.job_id if record else None, config=_config(attempt))


def _config(attempt: AttemptDir) -> RunConfig | None:
    """Return the attempt's config; None if it cannot be read, or is that of another version."""
    try:
        return load_resolved(attempt.config)
    except BslError:
        return None
