"""`bsl logs`: the output of all ranks in one view."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import RUN

if TYPE_CHECKING:
    from bigsci_launch.runs.layout import AttemptDir
    from bigsci_launch.runs.logs import LogFilter, MergedLogs


@click.command(
    short_help="Print the output of all ranks, merged by time.",
    epilog="Example: bsl logs demo --rank 0-3 --grep 'loss|error'",
)
@RUN
@click.option("-f", "--follow", is_flag=True, help="Keep printing as ranks write, until the attempt ends.")
@click.option("--rank", "ranks", metavar="RANKS", help="Only these global ranks, such as 3 or 0-3,7.")
@click.option("--node", metavar="NAME", help="Only ranks on this node.")
@click.option("--grep", "pattern", metavar="RE", help="Only lines that match this regular expression.")
@click.option("-n", "--tail", metavar="N", type=click.IntRange(min=1), help="Only the last N lines of those, at once.")
@click.option("--since", "begin", metavar="TIME", help="Only lines since then: 90s, 10m, 2h, 1d ago, or a time.")
@click.option("--color", is_flag=True, help="Keep the colours of the ranks' output if stdout is a terminal.")
@click.option("--attempt", "name", metavar="NAME", help="This attempt, such as 0001 or 0001.r1; default: the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print each line as a JSON document.")
def logs(
    run: str | None,
    follow: bool,
    ranks: str | None,
    node: str | None,
    pattern: str | None,
    tail: int | None,
    begin: str | None,
    color: bool,
    name: str | None,
    as_json: bool,
) -> None:
    """Print the logs of RUN's newest attempt, merged by time, each line with node, rank and coordinate.

    Times are those of your time zone; those in the log files and in JSON are UTC, and end with Z.

    Control characters are shown as escapes such as \\x1b, and colours are left out. The log files have all bytes.
    """
    from bigsci_launch.runs.find import find_attempt, find_run
    from bigsci_launch.runs.generations.read import read_topology
    from bigsci_launch.runs.logs import MergedLogs

    wanted, since = _wanted(ranks, node, pattern), _since(begin)
    found = find_run(run)
    topology = read_topology(found)
    if wanted.ranks and topology and max(wanted.ranks) >= topology.world_size:
        raise click.BadParameter(f"the run has ranks 0-{topology.world_size - 1}", param_hint="--rank")
    attempt = find_attempt(found, name)
    merged = MergedLogs(attempt, wanted, as_json=as_json)
    safe = str if as_json else console.output_printer(color)
    recent = None if tail is None and not since else merged.tail(tail, since)
    _print(merged, recent, attempt if follow else None, safe)
    for trouble in merged.troubles():
        console.talk(trouble)


def _print(
    merged: MergedLogs, recent: list[str] | None, followed: AttemptDir | None, safe: Callable[[str], str]
) -> None:
    """Print the `recent` lines, else all of them; then those that come, until the attempt that is `followed` ends."""
    from bigsci_launch.runs.logs import end_detector

    if recent is not None or followed is None:
        console.answer_lines(map(safe, merged.lines() if recent is None else recent), console.answer_output)
    if followed is not None:
        for line in merged.follow(end_detector(followed)):
            console.answer_output(safe(line))


def _since(text: str | None) -> str:
    from bigsci_launch.runs.logs import parse_since

    try:
        return parse_since(text, time.time()) if text is not None else ""
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is neither an age such as 10m nor a time", param_hint="--since") from error


def _wanted(ranks: str | None, node: str | None, pattern: str | None) -> LogFilter:
    from bigsci_launch.runs.logs import LogFilter, parse_ranks

    try:
        wanted = parse_ranks(ranks) if ranks is not None else None
        return LogFilter(wanted, node, re.compile(pattern) if pattern is not None else None)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rank") from error
    except re.error as error:
        raise click.BadParameter(f"{pattern!r}: {error}", param_hint="--grep") from error
