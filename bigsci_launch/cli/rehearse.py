"""`bsl rehearse`: the same run on two nodes, in minutes, with a verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import JSON, SET

if TYPE_CHECKING:
    from bigsci_launch.rehearse.report import RehearsalReport


@click.command(
    short_help="Rehearse a run on two nodes: steps, save, stop, resume, a killed rank.",
    epilog="Example: bsl rehearse configs/demo.yaml",
)
@click.argument("config", type=click.Path(path_type=Path))
@SET
@click.option("--local", is_flag=True, help="Run on this machine, without Slurm.")
@click.option(
    "--start-within",
    metavar="HH:MM:SS",
    default="01:00:00",
    show_default=True,
    help="Give up if Slurm has no nodes for an attempt after this time; the verdict is then unknown.",
)
@JSON
@click.pass_context
def rehearse(
    ctx: click.Context, config: Path, overrides: tuple[str, ...], local: bool, start_within: str, as_json: bool
) -> None:
    """Run a small copy of the run in CONFIG: it starts, trains, evaluates, saves, loses a rank, resumes, stops.

    The copy has a folder of its own. Exits with 0 for go, 1 for no-go, and 4 if it never started.
    """
    from bigsci_launch.rehearse.arrange import arrange
    from bigsci_launch.rehearse.run import run_rehearsal
    from bigsci_launch.units import parse_slurm_duration

    try:
        pending_s = parse_slurm_duration(start_within)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--start-within") from error
    arrangement = arrange(
        config, overrides, working_directory=Path.cwd(), python=sys.executable, local=local, pending_s=pending_s
    )
    for change in arrangement.changes:
        console.talk(f"changed: {change.line}")
    for line in arrangement.remarks():
        console.talk(line)
    report = run_rehearsal(arrangement, sys.argv, console.talk)
    _show(report, as_json)
    ctx.exit(report.exit_code)


def _show(report: RehearsalReport, as_json: bool) -> None:
    from bigsci_launch.rehearse import report as shown

    if as_json:
        console.answer_json(shown.report_document(report))
        return
    console.answer_lines(shown.heading_lines(report))
    console.answer_table(shown.COLUMNS, shown.phase_rows(report.played.phases))
    console.answer_lines(shown.closing_lines(report))
