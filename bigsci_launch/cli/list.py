"""`bsl list`: the runs that can be found."""

from __future__ import annotations

import time

import click

from bigsci_launch.cli import console


@click.command("list", short_help="List the runs, the most recently active first.", epilog="Example: bsl list --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_(as_json: bool) -> None:
    """List the runs under $BSL_RUNS (default: ./runs), the most recently active first."""
    from bigsci_launch.runs.find import runs_root
    from bigsci_launch.status.list import LIST_COLUMNS, list_document, list_rows
    from bigsci_launch.status.read import list_runs

    root = runs_root()
    summaries = list_runs(root)
    if as_json:
        console.answer_json(list_document(summaries, str(root)))
    elif summaries:
        console.answer_table(LIST_COLUMNS, list_rows(summaries, time.time()), spare=("directory", "attempt"))
    else:
        console.talk(f"no runs under {root}; set BSL_RUNS to list those of another folder")
