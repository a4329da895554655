"""`bsl status`: what a run is doing."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bigsci_launch.cli import console
from bigsci_launch.errors import RunDirError

if TYPE_CHECKING:
    from bigsci_launch.checkpoints.restart import Restart

UNASKED_BYTES = 256 << 20
"""How many bytes of weights are read at most, if a loss jumped: less than a second's worth."""


@click.command(short_help="Show what a run is doing, or why it ended.", epilog="Example: bsl status demo")
@click.argument("run", required=False)
@click.option(
    "--jobid", metavar="ID", help="Show the run of this Slurm job, or the job itself if bsl did not submit it."
)
@click.option("--attempt", "name", metavar="NAME", help="This attempt, such as 0001 or 0001.r1; default: the newest.")
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML page: losses, findings, acts."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(run: str | None, jobid: str | None, name: str | None, html: Path | None, as_json: bool) -> None:
    """Show the state of RUN (a name or a directory; default: the run submitted last) and of its slowest rank."""
    from bigsci_launch.nodes.evaluate import evaluate_run
    from bigsci_launch.runs.find import find_run
    from bigsci_launch.status.documents import status_document
    from bigsci_launch.status.read import read_status
    from bigsci_launch.status.text import status_lines
    from bigsci_launch.watch.show.kept_page import write_run_page

    if run is not None and jobid is not None:
        raise click.UsageError("give a run or --jobid, not both")
    try:
        found = find_run(run, jobid)
    except RunDirError:
        if jobid is None or html is not None or not _show_foreign(jobid, as_json):
            raise
        return
    for line in evaluate_run(found):
        console.talk(line)
    known = read_status(found, name)
    if known.restart is not None and known.restart.is_changed:
        known = replace(known, restart=_with_weights(known.restart))
    if html is not None:
        write_run_page(html, known)
    _show(status_document(known) if as_json else status_lines(known))


def _with_weights(restart: Restart) -> Restart:
    """Return the restart with what small dumps or a small checkpoint show of the cause."""
    from bigsci_launch.checkpoints.around import audit_restart

    return replace(restart, causes=(*restart.causes, *audit_restart(restart, UNASKED_BYTES).causes))


def _show_foreign(jobid: str, as_json: bool) -> bool:
    """Show what Slurm knows of a job without a run directory. Return False if the job has one, which is unreadable."""
    from bigsci_launch.scheduler.slurm import query_job
    from bigsci_launch.status.documents import foreign_job_document
    from bigsci_launch.status.text import job_lines

    job = query_job(jobid)
    if job.run_directory is None:
        _show(foreign_job_document(job) if as_json else job_lines(job, time.time()))
    return job.run_directory is None


def _show(answer: dict[str, Any] | list[str]) -> None:
    if isinstance(answer, dict):
        console.answer_json(answer)
    else:
        console.answer("\n".join(answer))
