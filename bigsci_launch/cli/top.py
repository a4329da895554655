"""`bsl top`: all jobs on one screen."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import click

from bigsci_launch.cli import console
from bigsci_launch.errors import INSTALL_TOP, BslError


@click.command(short_help="Show all your jobs on one screen.", epilog="Example: bsl top")
def top() -> None:
    """Show all runs under $BSL_RUNS (default: ./runs) and all your jobs in Slurm, of any launcher, on one screen.

    \b
    Enter    a run's curves and ranks          /  find by name, job or state
    s w l g  spy, why, slow, logs              o  another order
    c x      control, cancel (asks first)      q  quit; Esc goes back

    Slurm is asked every 30 seconds, the files of the runs on the screen are read every 3.
    """
    from bigsci_launch.top.draw import first_lines

    if find_spec("textual") is None:
        raise BslError("bsl top needs the package textual, which is not installed", hint=INSTALL_TOP)
    if not (console.is_interactive() and sys.stderr.isatty()):
        raise click.UsageError("bsl top needs a terminal; for a pipe: bsl list --json")
    with console.first_frame(first_lines):
        from bigsci_launch.cli.screens.top import TopApp
        from bigsci_launch.runs.find import runs_root

        app = TopApp(runs_root())
    app.run(mouse=False)
