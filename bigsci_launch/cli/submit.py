"""`bsl submit`: submit a run file as a job, to Slurm or to this machine."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import JSON, SET

if TYPE_CHECKING:
    from bigsci_launch.launch.start_job import Submission


@click.command(
    short_help="Submit a run, or its next attempt.",
    epilog="Example: bsl submit configs/demo.yaml --set training.steps=100 --dry-run",
)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("arguments", metavar="[-- ARGUMENT...]", nargs=-1)
@SET
@click.option("--dry-run", "--dryrun", "dry_run", is_flag=True, help="Print the script and rank map; start nothing.")
@click.option("--local", is_flag=True, help="Run on this machine, without Slurm.")
@click.option("--detach", is_flag=True, help="With --local: leave the ranks in the background.")
@click.option(
    "--force",
    is_flag=True,
    help="Submit even if `bsl plan check` finds errors, the dataset is missing, the run has changed since its "
    "checkpoint, or an attempt on another host may still run; all of it is printed.",
)
@click.option("--wait", is_flag=True, help="Wait until the job ends, and exit with its exit code.")
@JSON
@click.pass_context
def submit(
    ctx: click.Context,
    config: Path,
    arguments: tuple[str, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    local: bool,
    detach: bool,
    force: bool,
    wait: bool,
    as_json: bool,
) -> None:
    """Submit the run in CONFIG (- is stdin). Submitting it again adds an attempt, which resumes from the last
    checkpoint. Each ARGUMENT after -- goes to the program in `run.command`, after its own.

    In a pipe, it prints only the job id (for a local attempt, the launcher's pid). A local attempt stays in the
    foreground unless --detach is given: Ctrl-C ends its ranks, and the exit code is theirs.
    """
    from bigsci_launch.launch import report
    from bigsci_launch.launch.foreground import exit_of, follow
    from bigsci_launch.launch.prepare import prepare
    from bigsci_launch.launch.submit import review, submit_reviewed

    written = prepare(
        config, overrides, arguments, working_directory=Path.cwd(), python=sys.executable, local=local, dry_run=dry_run
    )
    prepared = review(written, console.talk, force=force, dry_run=dry_run)
    if dry_run and as_json:
        console.answer_json(report.dry_run_document(prepared))
    elif dry_run:
        console.answer(report.dry_run_text(prepared))
    if dry_run:
        return
    if detach and prepared.request.scheduler == "slurm":
        raise click.UsageError("--detach is for local attempts: a Slurm job is in the background anyway")
    verifying = partial(console.late_progress, "verify checkpoint", 100)
    submission = submit_reviewed(prepared, sys.argv, console.talk, verifying, force=force)
    if not as_json:
        show(submission)
    code = follow(submission, wait=wait, detach=detach, tell=console.talk)
    if as_json:
        console.answer_json(report.submission_document(submission, None if code is None else exit_of(submission)))
    ctx.exit(code or 0)


def show(submission: Submission) -> None:
    """Print what to do next on a terminal, and only the id into a pipe."""
    from bigsci_launch.launch import report

    if console.is_interactive():
        for line in report.submission_lines(submission):
            console.answer(line)
    else:
        console.answer(report.submission_id(submission))
        sys.stdout.flush()
