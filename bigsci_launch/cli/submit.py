"""`bsl submit`: from a run file to a job, on Slurm or on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console

if TYPE_CHECKING:
    from bigsci_launch.config.load import LoadedRun
    from bigsci_launch.launch.request import JobRequest
    from bigsci_launch.launch.submit import Submission
    from bigsci_launch.plan.price.stages import StageLayout
    from bigsci_launch.scheduler.job import JobInfo


@click.command(
    short_help="Submit a run, or the next attempt of it.",
    epilog="Example: bsl submit configs/demo.yaml --set training.steps=100 --dry-run",
)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Lay a value over the file's.")
@click.option("--dry-run", "--dryrun", "dry_run", is_flag=True, help="Print the script and the rank map; do nothing.")
@click.option("--local", is_flag=True, help="Run on this machine, without Slurm (default where there is no sbatch).")
@click.option("--detach", is_flag=True, help="With --local: leave the ranks in the background.")
@click.option("--force", is_flag=True, help="Submit although `bsl plan check` finds errors; they are named.")
@click.option("--wait", is_flag=True, help="Wait for the end of the job; exit as it did.")
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
    """Submit the run in CONFIG; the same run again adds an attempt, which goes on from the last checkpoint.

    In a pipe prints the job id alone (the launcher's pid for a local attempt). A local attempt stays in the
    foreground unless --detach is given: Ctrl-C ends its ranks, and its exit code is theirs.
    """
    from bigsci_launch.config.load import load_run
    from bigsci_launch.config.report import warning_lines
    from bigsci_launch.launch import report
    from bigsci_launch.launch import submit as launch

    loaded = settle_stages(load_run(config, overrides))
    for line in warning_lines(loaded):
        console.talk(f"warning: {line}")
    check_arithmetic(loaded, force=force)
    is_local = local or launch.is_local_by_default(loaded)
    request = launch.plan_submission(loaded, working_directory=Path.cwd(), python=sys.executable, local=is_local)
    if dry_run:
        stages = stages_of(loaded)
        if as_json:
            console.answer_json(report.dry_run_document(request, stages))
        else:
            console.answer(report.dry_run_text(request, stages))
        return
    if detach and not is_local:
        raise click.UsageError("--detach is for local attempts: a Slurm job is in the background anyway")
    for line in launch.notes(loaded, is_local=is_local, was_asked=local):
        console.talk(line)
    check_checkpoint(loaded, request)
    submission = launch.submit(loaded, request, sys.argv)
    if not as_json:
        show(submission)
    code = wait_for(submission, wait=wait, detach=detach)
    if as_json:
        console.answer_json(
            report.submission_document(submission, launch.exit_of(submission) if code is not None else None)
        )
    ctx.exit(code or 0)


def settle_stages(loaded: LoadedRun) -> LoadedRun:
    """The run with the layers of every stage written down, where they go by price: a job must not depend on it."""
    from dataclasses import replace

    from bigsci_launch.plan.choose.answer import settled_run

    config = settled_run(loaded.config, loaded.site)
    if config is loaded.config:
        return loaded
    return replace(loaded, config=config, origins={**loaded.origins, "parallelism.partition_method": "computed"})


def stages_of(loaded: LoadedRun) -> Sequence[StageLayout]:
    """What `bsl train` will have on each stage; another program has layers of its own."""
    from bigsci_launch.plan.choose.answer import calibration_of, configured_setup
    from bigsci_launch.plan.price.stages import stage_layout

    if loaded.config.run.command is not None:
        return ()
    setup, _ = configured_setup(loaded.config, loaded.site)
    return stage_layout(setup, calibration_of(loaded.site))


def check_arithmetic(loaded: LoadedRun, *, force: bool) -> None:
    """Say what `bsl plan check` warns of, and stop at its errors unless forced.

    Raises:
        ConfigError: there are errors, and nobody forces the submission.
    """
    from bigsci_launch.errors import ConfigError, Problem
    from bigsci_launch.plan.choose.check import check_plan, finding_line

    findings = check_plan(loaded.config, loaded.site)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors and not force:
        problems = [
            Problem(loaded.origins.get(finding.key, ""), finding.key, f"{finding.text}: {finding.price}")
            for finding in errors
        ]
        hint = "`bsl plan check` shows the arithmetic; --force submits all the same"
        raise ConfigError(f"{loaded.path}: {len(problems)} findings of bsl plan check", problems=problems, hint=hint)
    for finding in errors:
        console.talk(f"forced in spite of {finding_line(finding)}")
    for finding in findings:
        if finding.severity == "warning":
            console.talk(finding_line(finding))


def check_checkpoint(loaded: LoadedRun, request: JobRequest) -> None:
    """Verify the checkpoint from which `bsl train` would go on: a job must not wait hours to find it damaged.

    Raises:
        CheckpointError: it is missing, damaged, or of another run.
    """
    from bigsci_launch.launch.submit import require_no_active_attempt, require_same_run
    from bigsci_launch.runs.checkpoints import CheckpointsDir, finish_interrupted
    from bigsci_launch.runs.resume import require_not_lost, verify_resume

    load = loaded.config.checkpoint.load
    if loaded.config.run.command is not None or (load in ("auto", "none") and not request.run.path.is_dir()):
        return
    require_same_run(request.run, loaded.config, request.topology)
    require_no_active_attempt(request.run)
    finish_interrupted(CheckpointsDir(request.run.checkpoints))
    with console.late_progress("verify checkpoint", 100) as report_progress:
        folder = verify_resume(
            loaded.config, request.topology, CheckpointsDir(request.run.checkpoints), report_progress
        )
    if folder is not None:
        console.talk(f"goes on from {folder}, which is as it was saved")
    elif load == "auto":
        require_not_lost(request.run)


def show(submission: Submission) -> None:
    """Print the id alone into a pipe, and what to do next on a terminal."""
    from bigsci_launch.launch import report

    if console.is_interactive():
        for line in report.submission_lines(submission):
            console.answer(line)
    else:
        console.answer(report.submission_id(submission))
        sys.stdout.flush()


def wait_for(submission: Submission, *, wait: bool, detach: bool) -> int | None:
    """Wait as far as it was asked for; the exit code of the training, or None without waiting."""
    from bigsci_launch.launch.foreground import watch
    from bigsci_launch.launch.submit import exit_code_of, wait_for_end

    if submission.process is not None:
        if detach:
            return None
        ending = watch(submission, console.talk)
        return 130 if ending.was_interrupted else ending.exit_code
    if not wait:
        return None
    try:
        job = wait_for_end(submission.request.run, tell_state)
    except KeyboardInterrupt:
        console.talk(f"no longer waiting; {submission.record.label} goes on")
        return 130
    return exit_code_of(submission, job)


def tell_state(job: JobInfo) -> None:
    """Say that the job has entered another state."""
    console.talk(f"job {job.job_id}: {job.state.value}" + (f" ({job.reason})" if job.reason else ""))
