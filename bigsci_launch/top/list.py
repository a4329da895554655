"""The rows of `bsl top`: one question to Slurm for all jobs, and the folders of runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bigsci_launch.errors import RunDirError, SlurmError
from bigsci_launch.runs.layout import RunDir, find_runs
from bigsci_launch.runs.ownership import owner_of
from bigsci_launch.scheduler.command import slurm_text
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.scheduler.slurm import UserJob, jobs_of_user
from bigsci_launch.top.rows import TopRow


def list_rows(root: Path) -> tuple[list[TopRow], str]:
    """Return all runs under `root` and all jobs of this user, and why Slurm's jobs are not known; empty if they are.

    Slurm is asked once.
    """
    jobs: list[UserJob] = []
    trouble = ""
    try:
        jobs = jobs_of_user(os.geteuid())
    except SlurmError as error:
        trouble = slurm_text(error.stderr) or error.message
    folders: dict[str, UserJob] = {}
    for each in jobs:
        if each.job.run_directory is not None:
            known = folders.get(each.job.run_directory)
            if known is None or _is_nearer(each.job, known.job):
                folders[each.job.run_directory] = each
    runs = {str(run.path): run for run in _own_runs(root)}
    rows = [_row_of_run(run, folders.get(path)) for path, run in runs.items()]
    rows += [_row_of_run(RunDir(Path(path)), each) for path, each in folders.items() if path not in runs]
    rows += [TopRow(each.job.job_id, each.job.name or each.job.job_id, each.job, gpus=each.gpus)
             for each in jobs if each.job.run_directory is None]  # fmt: skip
    return rows, trouble


def _is_nearer(job: JobInfo, other: JobInfo) -> bool:
    """Whether a job of a run is the one to show: what runs comes before what waits, and that before what has ended."""

    def rank(each: JobInfo) -> int:
        return 2 if each.state.is_over else 1 if each.state.is_queued else 0

    return (rank(job), -(job.submitted or 0.0)) < (rank(other), -(other.submitted or 0.0))


def _own_runs(root: Path) -> Iterator[RunDir]:
    with suppress(RunDirError):
        for run in find_runs(root):
            with suppress(OSError):
                if owner_of(run) == os.geteuid():
                    yield run


def _row_of_run(run: RunDir, found: UserJob | None) -> TopRow:
    return TopRow(str(run.path), run.name, found.job if found else None, run, found.gpus if found else None)
