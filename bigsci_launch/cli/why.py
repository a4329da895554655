"""`bsl why`: why a job ended, and what to do now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import JSON
from bigsci_launch.errors import RunDirError

if TYPE_CHECKING:
    from bigsci_launch.runs.layout import RunDir
    from bigsci_launch.why.answer import Why


@click.command(short_help="Say why a job ended, and what to do now.", epilog="Example: bsl why slurm-1234.out")
@click.argument("what", nargs=-1, metavar="[JOBID|RUN|FOLDER|LOG]...")
@click.option("--attempt", "name", metavar="NAME", help="This attempt of a run, such as 0001; default: the newest.")
@JSON
def why(what: tuple[str, ...], name: str | None, as_json: bool) -> None:
    """Say why a job ended, which rank or node failed first, and what to do now.

    It takes the ID of any Slurm job, a run (default: the run submitted last), a folder of logs, or logs: what ranks,
    srun, torchrun and the kernel printed, and error files of torch elastic. It exits with 0 if the reason is known, and
    with 1 if what was read does not say it, or if the job still runs.
    """
    found = _answer(what, name)
    show(found, as_json)
    if not found.is_known:
        raise SystemExit(1)


def show(found: Why, as_json: bool) -> None:
    from bigsci_launch.why.answer import why_document, why_lines

    if as_json:
        console.answer_json(why_document(found))
    else:
        console.answer("\n".join(why_lines(found)))


def _answer(what: tuple[str, ...], name: str | None) -> Why:
    from bigsci_launch.runs.find import find_run
    from bigsci_launch.scheduler.job_ids import is_job_id
    from bigsci_launch.why.find import why_logs

    paths = [Path(each) for each in what]
    if len(what) == 1 and is_job_id(what[0]) and not paths[0].exists():
        return _of_job(what[0], name)
    if not what or (len(what) == 1 and not paths[0].is_file() and _is_run(what[0])):
        return why_of_run(find_run(what[0] if what else None), name)
    if name is not None:
        raise click.UsageError("--attempt is for a run")
    return why_logs(paths)


def _is_run(argument: str) -> bool:
    """Whether an argument names a run; a folder of logs does not, nor what does not exist."""
    from bigsci_launch.runs.find import find_run

    try:
        find_run(argument)
    except RunDirError:
        return False
    return True


def _of_job(job_id: str, name: str | None) -> Why:
    from bigsci_launch.runs.find import find_run
    from bigsci_launch.scheduler.slurm import query_job
    from bigsci_launch.why.find import why_job

    try:
        run = find_run(None, job_id)
    except RunDirError:
        job = query_job(job_id)
        if job.run_directory is not None:
            raise
        return why_job(job)
    return why_of_run(run, name)


def why_of_run(run: RunDir, name: str | None) -> Why:
    """Return why an attempt of a run ended, with what the rings show that its ranks have left."""
    from bigsci_launch.runs.find import run_argument
    from bigsci_launch.spy.judge.rings_left import what_rings_show
    from bigsci_launch.spy.look.collect import collect
    from bigsci_launch.spy.look.target import target_of_ended_run
    from bigsci_launch.status.ending import ending_advice
    from bigsci_launch.status.read import read_status
    from bigsci_launch.why.answer import Why
    from bigsci_launch.why.find import why_run

    status = read_status(run, name)
    if status.exit is None:
        is_active = status.job.state.is_active
        kind, said = ("running", "it has not ended") if is_active else ("unknown", "no record shows whether it ended")
        return Why(
            f"run {run.name}",
            kind,
            f"{said}: {status.job.state.value}",
            "none" if is_active else "not known",
            next=f"bsl status {run_argument(run)}",
        )
    shown = what_rings_show(collect(target_of_ended_run(run, status.attempt)).evidence())
    advice = ending_advice(status.exit, run_argument(run), status.next_start)
    if advice is None and shown:
        advice = f"bsl trace last {run_argument(run)}   (the last calls of every rank)"
    return why_run(run.name, status.attempt, status.exit, advice, shown)
