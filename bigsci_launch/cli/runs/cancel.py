"""`bsl cancel`: end the queued or running attempt of a run."""

from __future__ import annotations

import click

from bigsci_launch.cli import console


@click.command(epilog="Example: bsl cancel demo")
@click.argument("run")
def cancel(run: str) -> None:
    """End the queued or running attempt of RUN. Ranks get TERM now, and KILL some seconds later."""
    from bigsci_launch.launch.cancel import cancel_run
    from bigsci_launch.runs.find import find_run

    console.answer(cancel_run(find_run(run)))
