"""`bsl status`: what a run is doing."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import completion, console
from bigsci_launch.cli.options import RUNS
from bigsci_launch.errors import RunDirError

if TYPE_CHECKING:
    from bigsci_launch.checkpoints.restart import Restart
    from bigsci_launch.runs.layout import RunDir
    from bigsci_launch.scheduler.job import JobInfo
    from bigsci_launch.status.read import RunStatus

WATCH_EVERY_S = 10.0
"""Slurm is asked each time."""
UNASKED_BYTES = 256 << 20
"""How many bytes of weights are read at most, if a loss jumped: less than a second's worth."""


@click.command(short_help="Show what runs are doing, or why they ended.", epilog="Example: bsl status demo")
@RUNS
@click.option(
    "--jobid",
    metavar="ID",
    shell_complete=completion.jobs,
    help="Show the run of this Slurm job, or the job itself if bsl did not submit it.",
)
@click.option("--attempt", "name", metavar="NAME", help="This attempt, such as 0001 or 0001.r1; default: the newest.")
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML page: losses, findings, acts."
)
@click.option("-w", "--watch", is_flag=True, help="Show it again every 10 seconds, until all have ended.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; of several runs, one with all of them.")
def status(
    runs: tuple[str, ...], jobid: str | None, name: str | None, html: Path | None, watch: bool, as_json: bool
) -> None:
    """Show the state of each RUN (a name or a directory; default: the run submitted last) and of its slowest rank."""
    if runs and jobid is not None:
        raise click.UsageError("give runs or --jobid, not both")
    if len(runs) > 1 and (name is not None or html is not None):
        raise click.UsageError("--attempt and --html are for one run")
    if watch and (as_json or html is not None):
        raise click.UsageError("--watch is for people: without --json and --html")
    found = _find(runs, jobid)
    if not isinstance(found, list):
        if html is not None:
            raise click.UsageError(f"--html is for runs: bsl did not submit job {jobid}")
        _show_foreign(found, as_json)
    elif watch:
        _watch(found, name)
    else:
        _show_runs(found, name, html, as_json)


def _find(runs: tuple[str, ...], jobid: str | None) -> list[RunDir] | JobInfo:
    """Return the runs that are meant, or a job without a run directory."""
    from bigsci_launch.runs.find import find_run
    from bigsci_launch.scheduler.slurm import query_job

    try:
        return [find_run(run, jobid) for run in runs or (None,)]
    except RunDirError:
        if jobid is None or (job := query_job(jobid)).run_directory is not None:
            raise
        return job


def _show_runs(runs: list[RunDir], name: str | None, html: Path | None, as_json: bool) -> None:
    from bigsci_launch.status.documents import status_document
    from bigsci_launch.watch.show.kept_page import write_run_page

    all_known = [_read(run, name) for run in runs]
    if html is not None:
        write_run_page(html, all_known[0])
    if not as_json:
        console.answer("\n\n".join(map(_text, all_known)))
        return
    documents = [status_document(known) for known in all_known]
    console.answer_json(documents[0] if len(documents) == 1 else {"schema_version": 1, "runs": documents})


def _watch(runs: list[RunDir], name: str | None) -> None:
    """Show the states again and again, in place on a terminal, and as they change elsewhere."""
    from bigsci_launch.status.read import read_status

    with console.live() as show:
        while True:
            # What a restart has changed is not looked for in the weights each time.
            all_known = [read_status(run, name) for run in runs]
            text = "\n\n".join(map(_text, all_known))
            show(partial(_frame, text), text)
            if all(known.job.state.is_over or known.job.is_gone for known in all_known):
                return
            time.sleep(WATCH_EVERY_S)


def _frame(text: str, width: int, height: int) -> list[console.Spans]:
    return [[(line[:width], {})] for line in text.splitlines()[: height - 1]]


def _read(run: RunDir, name: str | None) -> RunStatus:
    from bigsci_launch.nodes.evaluate import evaluate_run
    from bigsci_launch.status.read import read_status

    for line in evaluate_run(run):
        console.talk(line)
    known = read_status(run, name)
    if known.restart is not None and known.restart.is_changed:
        known = replace(known, restart=_with_weights(known.restart))
    return known


def _text(known: RunStatus) -> str:
    from bigsci_launch.status.text import status_lines

    return "\n".join(status_lines(known))


def _with_weights(restart: Restart) -> Restart:
    """Return the restart with what small dumps or a small checkpoint show of the cause."""
    from bigsci_launch.checkpoints.around import audit_restart

    return replace(restart, causes=(*restart.causes, *audit_restart(restart, UNASKED_BYTES).causes))


def _show_foreign(job: JobInfo, as_json: bool) -> None:
    from bigsci_launch.status.documents import foreign_job_document
    from bigsci_launch.status.text import job_lines

    if as_json:
        console.answer_json(foreign_job_document(job))
    else:
        console.answer("\n".join(job_lines(job, time.time())))
