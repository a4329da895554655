"""`bsl list`: the runs that can be found."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import JSON

if TYPE_CHECKING:
    from bigsci_launch.scheduler.job import JobState


@click.command("list", short_help="List the runs, the most recently active first.", epilog="Example: bsl list --json")
@click.option("--state", "states", metavar="STATE", multiple=True, help="Only runs in this state, such as RUNNING.")
@click.option("-n", "most", metavar="N", type=click.IntRange(min=1), help="Only the N most recently active.")
@JSON
def list_(states: tuple[str, ...], most: int | None, as_json: bool) -> None:
    """List the runs under $BSL_RUNS (default: ./runs), the most recently active first."""
    from bigsci_launch.runs.find import runs_root
    from bigsci_launch.status.list import LIST_COLUMNS, list_document, list_rows
    from bigsci_launch.status.read import list_runs

    root = runs_root()
    summaries = list_runs(root)
    if wanted := _parse_states(states):
        summaries = [summary for summary in summaries if summary.state in wanted]
    summaries = summaries[:most]
    if as_json:
        console.answer_json(list_document(summaries, str(root)))
    elif summaries:
        console.answer_table(LIST_COLUMNS, list_rows(summaries, time.time()), spare=("directory", "attempt"))
    elif states:
        console.talk(f"no runs in state {' or '.join(sorted(state.value for state in wanted))} under {root}")
    else:
        console.talk(f"no runs under {root}; set BSL_RUNS to list those of another folder")


def _parse_states(words: tuple[str, ...]) -> frozenset[JobState]:
    from bigsci_launch.scheduler.job import JobState

    names = [name.strip().upper() for word in words for name in word.split(",")]
    for name in names:
        if name not in JobState.__members__:
            raise click.BadParameter(f"{name!r}; `bsl list` shows the states of the runs", param_hint="--state")
    return frozenset(JobState[name] for name in names)
