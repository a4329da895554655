"""`bsl logs`: the output of all ranks in one view."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console

if TYPE_CHECKING:
    from bigsci_launch.runs.logs import LogFilter


@click.command(
    short_help="Print the output of all ranks, merged by time.",
    epilog="Example: bsl logs demo --rank 0-3 --grep 'loss|error'",
)
@click.argument("run", required=False)
@click.option("-f", "--follow", is_flag=True, help="Keep printing as ranks write, until the attempt ends.")
@click.option("--rank", "ranks", metavar="RANKS", help="Only these global ranks, such as 3 or 0-3,7.")
@click.option("--node", metavar="NAME", help="Only ranks on this node.")
@click.option("--grep", "pattern", metavar="RE", help="Only lines that match this regular expression.")
@click.option("--tail", metavar="N", type=click.IntRange(min=1), help="Only the last N lines of those, at once.")
@click.option("--color", is_flag=True, help="Keep the colours of the ranks' output if stdout is a terminal.")
@click.option("--attempt", "name", metavar="NAME", help="This attempt, such as 0001 or 0001.r1; default: the newest.")
def logs(
    run: str | None,
    follow: bool,
    ranks: str | None,
    node: str | None,
    pattern: str | None,
    tail: int | None,
    color: bool,
    name: str | None,
) -> None:
    """Print the logs of RUN's newest attempt, merged by time (UTC), each line with node, rank and coordinate.

    Control characters are shown as escapes such as \\x1b, and colours are left out. The log files have all bytes.
    """
    from bigsci_launch.runs.find import find_attempt, find_run
    from bigsci_launch.runs.generations.read import read_topology
    from bigsci_launch.runs.logs import MergedLogs, end_detector

    wanted = _wanted(ranks, node, pattern)
    found = find_run(run)
    topology = read_topology(found)
    if wanted.ranks and topology and max(wanted.ranks) >= topology.world_size:
        raise click.BadParameter(f"the run has ranks 0-{topology.world_size - 1}", param_hint="--rank")
    attempt = find_attempt(found, name)
    merged = MergedLogs(attempt, wanted)
    safe = console.output_printer(color)
    if tail is not None:
        console.answer_lines(map(safe, merged.tail(tail)), console.answer_output)
    if follow:
        for line in merged.follow(end_detector(attempt)):
            console.answer_output(safe(line))
    elif tail is None:
        console.answer_lines(map(safe, merged.lines()), console.answer_output)
    for trouble in merged.troubles():
        console.talk(trouble)


def _wanted(ranks: str | None, node: str | None, pattern: str | None) -> LogFilter:
    from bigsci_launch.runs.logs import LogFilter, parse_ranks

    try:
        wanted = parse_ranks(ranks) if ranks is not None else None
        return LogFilter(wanted, node, re.compile(pattern) if pattern is not None else None)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rank") from error
    except re.error as error:
        raise click.BadParameter(f"{pattern!r}: {error}", param_hint="--grep") from error
