"""`bsl submit`: submit a run file as a job, to Slurm or to this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.errors import BslError

if TYPE_CHECKING:
    from bigsci_launch.config.schema.run import RunConfig
    from bigsci_launch.launch.job.request import JobRequest
    from bigsci_launch.launch.submit import Submission
    from bigsci_launch.runs.changes import DataLikeness
    from bigsci_launch.runs.checkpoints import CheckpointRecord


@click.command(
    short_help="Submit a run, or the next attempt of it.",
    epilog="Example: bsl submit configs/demo.yaml --set training.steps=100 --dry-run",
)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of the file.")
@click.option("--dry-run", "--dryrun", "dry_run", is_flag=True, help="Print the script and rank map; start nothing.")
@click.option("--local", is_flag=True, help="Run on this machine, without Slurm.")
@click.option("--detach", is_flag=True, help="With --local: leave the ranks in the background.")
@click.option(
    "--force",
    is_flag=True,
    help="Submit even if `bsl plan check` finds errors, the run has changed since its checkpoint, or an attempt on "
    "another host may still run; all of it is printed.",
)
@click.option("--wait", is_flag=True, help="Wait until the job ends, and exit with its exit code.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def submit(
    ctx: click.Context,
    config: Path,
    overrides: tuple[str, ...],
    dry_run: bool,
    local: bool,
    detach: bool,
    force: bool,
    wait: bool,
    as_json: bool,
) -> None:
    """Submit the run in CONFIG. Submitting it again adds an attempt, which resumes from the last checkpoint.

    In a pipe, it prints only the job id (for a local attempt, the launcher's pid). A local attempt stays in the
    foreground unless --detach is given: Ctrl-C ends its ranks, and the exit code is theirs.
    """
    from bigsci_launch.config.report import warning_lines
    from bigsci_launch.launch import report
    from bigsci_launch.launch import submit as launch
    from bigsci_launch.launch.foreground import follow
    from bigsci_launch.launch.leave_out import leave_out_bad_nodes
    from bigsci_launch.launch.prepare import find_start, prepare, require_sound

    here, python = Path.cwd(), sys.executable
    prepared = prepare(config, overrides, working_directory=here, python=python, local=local, dry_run=dry_run)
    loaded, request = prepared.loaded, prepared.request
    for line in warning_lines(loaded):
        console.talk(f"warning: {line}")
    if not force:
        require_sound(prepared)
    for line in report.remark_lines(prepared.findings):
        console.talk(line)
    request, lines = leave_out_bad_nodes(request, loaded.config.slurm, is_dry_run=dry_run)
    for line in (*lines, *report.caller_lines(request)):
        console.talk(line)
    if dry_run:
        for line in launch.dry_run_notes(request):
            console.talk(line)
        if as_json:
            console.answer_json(report.dry_run_document(request, prepared.stages))
        else:
            console.answer(report.dry_run_text(request, prepared.stages))
        return
    if detach and request.scheduler == "slurm":
        raise click.UsageError("--detach is for local attempts: a Slurm job is in the background anyway")
    for line in launch.notes(loaded, is_local=request.scheduler == "local"):
        console.talk(line)
    with console.late_progress("verify checkpoint", 100) as report_progress:
        folder = find_start(loaded.config, request, report_progress, force=force)
    if folder is not None:
        console.talk(f"resumes from {folder}, which is unchanged since it was saved")
    request = _review(loaded.config, request, folder, force=force)
    submission = launch.submit(loaded, request, sys.argv, force=force)
    for line in (*submission.record.said, *report.successor_lines(submission)):
        console.talk(line)
    if not as_json:
        show(submission)
    code = follow(submission, wait=wait, detach=detach, tell=console.talk)
    if as_json:
        ended = launch.exit_of(submission) if code is not None else None
        console.answer_json(report.submission_document(submission, ended))
    ctx.exit(code or 0)


def _review(config: RunConfig, request: JobRequest, folder: Path | None, *, force: bool) -> JobRequest:
    """Print what has changed since the checkpoint in `folder` was saved; with `force`, accept it."""
    from bigsci_launch.launch.prepare import accept_changes, review_changes
    from bigsci_launch.runs.changes import change_lines, require_accepted
    from bigsci_launch.runs.checkpoints import read_record

    record = read_record(folder) if folder else None
    changes = []
    if folder and record:
        changes = review_changes(folder, record, config, request, _likeness(record, Path(config.data.prefix)))
    if force and config.run.starts_trainer:
        request = accept_changes(request, folder, changes)
    if folder:
        require_accepted(str(folder), changes, request.accepted)
        for line in change_lines(folder.name, changes, request.accepted):
            console.talk(line)
    return request


def _likeness(record: CheckpointRecord, prefix: Path) -> DataLikeness | None:
    """Return how the dataset at `prefix` relates to that of a checkpoint; None if this machine cannot read it."""
    if record.data is None:
        return "unknown"
    try:
        from bigsci_launch.data.fingerprint import compare_with_saved
        from bigsci_launch.data.indexed import open_dataset

        return compare_with_saved(record.data, open_dataset(prefix))
    except (BslError, ImportError):
        return None


def show(submission: Submission) -> None:
    """Print what to do next on a terminal, and only the id into a pipe."""
    from bigsci_launch.launch import report

    if console.is_interactive():
        for line in report.submission_lines(submission):
            console.answer(line)
    else:
        console.answer(report.submission_id(submission))
        sys.stdout.flush()
