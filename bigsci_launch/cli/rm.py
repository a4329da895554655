"""`bsl rm`: delete a run."""

from __future__ import annotations

import sys

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import RUN_REQUIRED


@click.command(short_help="Delete a run that has ended.", epilog="Example: bsl rm demo --dry-run")
@RUN_REQUIRED
@click.option("-y", "--yes", is_flag=True, help="Delete without asking.")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
@click.pass_context
def rm(ctx: click.Context, run: str, yes: bool, dry_run: bool) -> None:
    """Delete RUN (a name or a directory): attempts, logs, checkpoints and dumps. It shows what goes, and asks.

    A run is kept if an attempt has not ended, as far as is known, or if one of its checkpoints is pinned.

    Exit code: 1 if the answer was no.
    """
    from bigsci_launch.launch.remove import plan_removal, remove_run
    from bigsci_launch.runs.find import find_run

    found = find_run(run)
    removal = plan_removal(found)
    for line in removal.lines:
        console.talk(line)
    if dry_run:
        console.answer(f"would delete {removal.run.path}")
        return
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("stdin is no terminal: add --yes to delete without asking")
    if not yes:
        if not click.confirm("delete all of it?", err=True):
            ctx.exit(1)
        # An attempt may have begun, or a checkpoint been pinned, while the question stood.
        removal = plan_removal(found)
    remove_run(removal)
    console.answer(f"deleted {removal.run.path}")
