"""`bsl trace`: the last calls of every rank, also of ranks that are gone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.errors import BslError, CollectError

if TYPE_CHECKING:
    from bigsci_launch.trace.last import RankCalls

NUM_SHOWN = 32
ALL_CALLS = 1 << 20
"""More than a ring has room for."""
NOTHING = "no rank left a record of its last calls"
WHY_NOTHING = "ranks that end well leave none, and `monitor.ring: none` keeps none"


@click.group(short_help="Show what every rank called last.", epilog="Example: bsl trace last demo")
def trace() -> None:
    """Show what every rank called last, also if its process can no longer answer."""


@trace.command(
    short_help="Print the last calls of all ranks, the odd ranks first.",
    epilog="Example: bsl trace last demo -n 5",
)
@click.argument("run", required=False, metavar="[RUN|FOLDER]")
@click.option(
    "-n", "count", type=click.IntRange(1, NUM_SHOWN), default=8, show_default=True, help="Calls of each rank."
)
@click.option("--attempt", "name", metavar="NAME", help="This attempt, such as 0001; default: the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON document.")
def last(run: str | None, count: int, name: str | None, as_json: bool) -> None:
    """Print the last calls of torch.distributed, of saving and of data of every rank of RUN (a name or a directory;
    default: the run submitted last), or those in a FOLDER of rings.

    Ranks that ended badly left a copy in the run. Those of ranks that still run are read on their nodes.
    """
    from bigsci_launch.trace.last import document_of, group_ranks, words_of

    ranks = _read(run, name)
    if not ranks:
        raise CollectError(NOTHING, hint=WHY_NOTHING)
    groups = group_ranks(ranks, count)
    if as_json:
        console.answer_json(document_of(ranks, groups, count))
    else:
        console.answer_lines(words_of(groups, ranks))


@trace.command(
    short_help="Write the calls of all ranks as a file for Perfetto.",
    epilog="Example: bsl trace export demo --perfetto demo.json",
)
@click.argument("run", required=False, metavar="[RUN|FOLDER]")
@click.option("--perfetto", "file", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The file.")
@click.option("--attempt", "name", metavar="NAME", help="This attempt, such as 0001; default: the newest.")
def export(run: str | None, file: Path, name: str | None) -> None:
    """Write what the rings of RUN, or those in a FOLDER, hold as a trace.

    Ranks are processes, threads are threads, and an arrow runs through the ranks of each collective, from the first
    that came to the last. A copy that a rank has left holds thousands of calls; of a rank that still runs, the newest
    32 of each thread are read.
    """
    from bigsci_launch.trace.export import write_trace

    ranks = _read(run, name, ALL_CALLS)
    for each in ranks:
        if each.why is not None:
            console.talk(f"{each.name}: not known: {each.why}")
    if all(each.ring is None for each in ranks):
        raise CollectError(NOTHING, hint=WHY_NOTHING)
    done = write_trace(ranks, file)
    console.talk(f"{file}: {done.num_calls} calls of {done.num_ranks} ranks; open it at ui.perfetto.dev")


def _read(run: str | None, name: str | None, num_last: int = NUM_SHOWN) -> list[RankCalls]:
    from bigsci_launch.runs.find import find_attempt, find_run
    from bigsci_launch.spy.look.collect import collect
    from bigsci_launch.spy.look.target import find_target
    from bigsci_launch.trace.read import read_copies, read_files, read_nodes, with_living

    if run is not None and (found := sorted(Path(run).glob("*.ring"))):
        return read_files(found, num_last)
    attempt = find_attempt(find_run(run), name)
    copies = read_copies(attempt, num_last)
    if name is not None or (copies and all(each.is_copy for each in copies)):
        return copies
    try:
        living = read_nodes(collect(find_target(run, None)).nodes)
    except BslError:
        if not copies:
            raise
        return copies
    copies = read_copies(attempt, num_last)  # a rank that has ended during the look was on its node no longer
    return with_living(copies, living) if copies else living
