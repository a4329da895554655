"""Finds the run directory that a person means by a path, a name, a job ID, or nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bigsci_launch.errors import JobNotFound, RunDirError, SlurmUnavailable
from bigsci_launch.runs.attempts import JobRecord, identify, read_job
from bigsci_launch.runs.layout import AttemptDir, RunDir, find_runs, open_run
from bigsci_launch.runs.ownership import owner_of
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.scheduler.job_ids import is_job_id
from bigsci_launch.scheduler.slurm import query_job

LIST_HINT = "`bsl list` shows the runs that can be found; BSL_RUNS names another folder of runs"


def runs_root() -> Path:
    """Return where runs are looked up by name: `$BSL_RUNS`, or `runs` in the current folder."""
    return Path(os.environ.get("BSL_RUNS") or "runs")


def run_argument(run: RunDir) -> str:
    """Return what to type for `run` in the current folder: its name if that is enough, else its shell-quoted path."""
    return run.name if (runs_root() / run.name).resolve() == run.path else shlex.quote(str(run.path))


def find_run(argument: str | None, job_id: str | None = None) -> RunDir:
    """Return the run of a job ID, or the run that `argument` names by path or name; without both, the latest run.

    Raises:
        RunDirError: there is no such run; SlurmUnavailable, JobNotFound: the job could not be found anywhere.
    """
    if job_id is not None:
        return find_run_of_job(job_id)
    if argument is None:
        return latest_run()
    if _is_path(argument):
        return open_run(Path(argument))
    if (named := runs_root() / argument).is_dir():
        return open_run(named)
    hint = f"for a Slurm job: `bsl spy --jobid {argument}`" if is_job_id(argument) else LIST_HINT
    meant = "".join(f"; did you mean {name}?" for name in _similar_names(argument))
    raise RunDirError(f"no run {argument!r} under {runs_root()}, and it is not a path{meant}", hint=hint)


def _similar_names(argument: str) -> list[str]:
    """Return the name of the run that `argument` is most like; none if it is like none."""
    from difflib import get_close_matches

    return get_close_matches(argument, [run.name for run in find_runs(runs_root())], n=1)


def find_attempt(run: RunDir, name: str | None = None) -> AttemptDir:
    """Return the attempt of a run that is called `name`; without a name, the newest.

    Raises:
        RunDirError: there is none.
    """
    attempts = run.attempts()
    if not attempts:
        raise RunDirError(f"{run.path}: nothing has been submitted yet", hint="`bsl submit CONFIG` submits a run")
    named = [attempt for attempt in attempts if name in (None, attempt.name)]
    if not named:
        raise RunDirError(
            f"run {run.name} has no attempt {name!r}", hint=f"it has {', '.join(attempt.name for attempt in attempts)}"
        )
    return named[-1]


def find_run_of_job(job_id: str) -> RunDir:
    """Return the run of a Slurm job, found by the job's comment, else by the job records under `runs_root()`.

    Raises:
        RunDirError: `bsl` did not submit the job; JobNotFound, SlurmUnavailable: no source knows it.
    """
    try:
        job = query_job(job_id)
    except (JobNotFound, SlurmUnavailable):
        if run := _find_by_record(job_id):
            return run
        raise
    if job.run_directory is not None:
        return open_run(Path(job.run_directory))
    if run := _find_by_record(job.number, job):
        return run
    raise RunDirError(f"job {job_id} was not submitted by bsl: it has no run directory")


def latest_run() -> RunDir:
    """Return the run of this user that was submitted last; without any, the last one of others in the same folder."""
    submitted = [(_is_own(run), _last_submission(run), run.name, run) for run in find_runs(runs_root())]
    if not submitted:
        hint = f"{LIST_HINT}; `bsl spy --jobid ID` takes any Slurm job, and `bsl spy --pid PID` any program"
        raise RunDirError(f"there are no runs under {runs_root()}", hint=hint)
    return max(submitted, key=lambda entry: entry[:3])[3]


def _is_path(argument: str) -> bool:
    try:
        return "/" in argument or argument in (".", "..") or RunDir(Path(argument)).record.is_file()
    except OSError:
        return True  # opening it as a path will report what is wrong with it


def _is_own(run: RunDir) -> bool:
    """Return whether the run is this user's; one that cannot be looked at is not."""
    try:
        return owner_of(run) == os.geteuid()
    except OSError:
        return False


def _last_submission(run: RunDir) -> float:
    return max((record.submitted for _, record in _records(run)), default=0.0)


def _find_by_record(job_id: str, job: JobInfo | None = None) -> RunDir | None:
    """Return the run that was submitted last with this job id, and whose job `job` may be; None if there is none."""
    found = [
        (record.submitted, run.name, run)
        for run in find_runs(runs_root())
        for attempt, record in _records(run)
        if record.job_id == job_id and (job is None or identify(attempt, record, job).is_ours is not False)
    ]
    return max(found, key=lambda entry: entry[:2])[2] if found else None


def _records(run: RunDir) -> Iterator[tuple[AttemptDir, JobRecord]]:
    """Yield the attempts of a run with their jobs. Broken ones are skipped: the run that is wanted may be another."""
    attempts: list[AttemptDir] = []
    with suppress(RunDirError):
        attempts = run.attempts()
    for attempt in attempts:
        with suppress(RunDirError):
            if record := read_job(attempt):
                yield attempt, record
