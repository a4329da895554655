"""`bsl cancel`: end the queued or running attempt of a run."""

from __future__ import annotations

import click

from bigsci_launch.cli import completion, console
from bigsci_launch.cli.options import RUNS
from bigsci_launch.errors import BslError, RunDirError


@click.command(epilog="Example: bsl cancel demo")
@RUNS
@click.option(
    "--jobid", metavar="ID", shell_complete=completion.jobs, help="End this Slurm job, or the run whose job it is."
)
def cancel(runs: tuple[str, ...], jobid: str | None) -> None:
    """End the queued or running attempt of each RUN. Ranks get TERM now, and KILL some seconds later."""
    from bigsci_launch.launch.cancel import cancel_called, cancel_run
    from bigsci_launch.runs.find import find_run

    if bool(runs) == (jobid is not None):
        raise click.UsageError("give runs or --jobid")
    if jobid is not None:
        console.answer(cancel_called(jobid))
    # All names are looked up before the first run is ended; one that cannot be ended keeps none of the others running.
    errors: list[BslError] = []
    for found in [find_run(run) for run in runs]:
        try:
            console.answer(cancel_run(found))
        except BslError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise RunDirError("; ".join(error.message for error in errors))
