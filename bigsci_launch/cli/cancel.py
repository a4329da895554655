"""`bsl cancel`: end the queued or running attempt of a run."""

from __future__ import annotations

import click

from bigsci_launch.cli import console


@click.command(epilog="Example: bsl cancel demo")
@click.argument("run", required=False)
@click.option("--jobid", metavar="ID", help="End this Slurm job, or the run whose job it is.")
def cancel(run: str | None, jobid: str | None) -> None:
    """End the queued or running attempt of RUN. Ranks get TERM now, and KILL some seconds later."""
    from bigsci_launch.launch.cancel import cancel_called, cancel_run
    from bigsci_launch.runs.find import find_run

    if (run is None) == (jobid is None):
        raise click.UsageError("give a run or --jobid")
    console.answer(cancel_called(jobid) if jobid is not None else cancel_run(find_run(run)))
