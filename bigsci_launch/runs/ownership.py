"""Whose job is it? Slurm gives a job id again: after a reset of its numbers, and every cluster counts for itself.

A job's comment names its run, so it decides. Some sites remove it, and sacct may not store it. Then the job's name, its
owner and the time of its submission are compared, which can show that a job is another's, but rarely more.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.errors import RunDirError
from bigsci_launch.procfs import user_name
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json
from bigsci_launch.scheduler.job import JobInfo

SAME_SUBMISSION_S = 300.0
"""How far the clocks of two machines, and the moments at which they record one submission, may be apart."""


@dataclass(frozen=True, slots=True)
class Identification:
    """Whether a job that Slurm knows is that of an attempt; None if that is unknown. `why` is half a sentence."""

    is_ours: bool | None
    why: str


def identify_job(attempt: AttemptDir, submitted: float, cluster: str | None, job: JobInfo) -> Identification:
    """Return whether `job` is the one that was `submitted` (seconds since the epoch) to `cluster` for `attempt`.

    The name of the cluster that answered is in `job.cluster`, if it is known.
    """
    if cluster and job.cluster and cluster != job.cluster:
        return Identification(
            False, f"job {job.job_id} is on cluster {cluster}, but only cluster {job.cluster} was queried"
        )
    run = RunDir(attempt.path.parent.parent)
    if (named := job.run_directory) is not None:
        if is_same_folder(Path(named), run.path):
            return Identification(True, f"the comment of job {job.job_id} names this run")
        return Identification(False, f"job {job.job_id} now belongs to another run: {named}")
    return _without_comment(run, attempt, submitted, job)


def _without_comment(run: RunDir, attempt: AttemptDir, submitted: float, job: JobInfo) -> Identification:
    name, user = _name_of(run), _owner_of(attempt.job)
    if job.name and name and job.name != name:
        return Identification(False, f"the number of job {job.job_id} was reused: it is now named {job.name}")
    if job.user and user and job.user not in user:
        return Identification(False, f"the number of job {job.job_id} was reused: it now belongs to user {job.user}")
    is_known = bool(job.name and name and job.user and user)
    if is_known and job.submitted is not None and abs(job.submitted - submitted) <= SAME_SUBMISSION_S:
        return Identification(True, f"job {job.job_id} matches this run by name, owner and time of submission")
    return Identification(None, f"job {job.job_id} has no comment that names its run")


def owner_of(run: RunDir) -> int:
    """Return the number of the user to whom a run belongs. One that is not there yet will be ours.

    Raises:
        OSError: its folder cannot be looked at.
    """
    try:
        return run.path.stat().st_uid
    except FileNotFoundError:
        return os.geteuid()


def require_own_run(run: RunDir, verb: str, hint: str = "") -> None:
    """Raise RunDirError unless the run is this user's: its files say what to signal, and to mark, and to remove."""
    if (owner := owner_of(run)) != os.geteuid():
        name = user_name(owner)
        raise RunDirError(f"{run.path} belongs to {name}, and only {name} may {verb}", hint=hint)


def is_same_folder(one: Path, other: Path) -> bool:
    """Whether two paths name the same folder, also through links and mounts. A path that does not exist is compared."""
    try:
        return one.resolve() == other.resolve() or one.samefile(other)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        return False


def _name_of(run: RunDir) -> str:
    """The job name of all attempts of a run; empty if it is not known."""
    try:
        document = read_json(run.record)
    except RunDirError:
        return ""
    return str(document.get("name") or "") if isinstance(document, dict) else ""


def _owner_of(path: Path) -> tuple[str, ...]:
    """The owner of a file, by name and by number, as squeue prints either; empty if it is not known."""
    try:
        uid = path.stat().st_uid
        return (pwd.getpwuid(uid).pw_name, str(uid))
    except (OSError, KeyError):
        return ()
