"""`bsl slow`: who makes a job slow, in which phase of a step, and by how many milliseconds."""

from __future__ import annotations

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import JSON, RUN_OR_FOLDER
from bigsci_launch.cli.spy import parse_topology

LOOK_S = 60.0


@click.command(short_help="Say which rank makes a job slow, and what it costs.", epilog="Example: bsl slow demo")
@RUN_OR_FOLDER
@click.option("--jobid", metavar="ID", help="A Slurm job instead of a run, of any program: look at it.")
@click.option("--pid", type=click.IntRange(min=1), help="Launcher here whose descendants are the ranks: look at them.")
@click.option(
    "--for", "seconds", type=click.FloatRange(5), metavar="SECONDS",
    help="Look at the ranks for so long instead of reading their rings (with --jobid and --pid: 60).",
)  # fmt: skip
@click.option("--topology", metavar="tp=2,pp=2,dp=2", help="Sizes of the axes, for a job that bsl did not submit.")
@JSON
def slow(
    run: str | None, jobid: str | None, pid: int | None, seconds: float | None, topology: str | None, as_json: bool
) -> None:
    """Say which rank, stage or link makes RUN slow (a name or a directory; default: the run submitted last), in which
    phase of a step, and how much shorter a step would be without it.

    It reads the rings of the ranks, while they run or after they ended badly, or those in a FOLDER. A program without
    rings, and one whose collectives run on GPUs, is looked at for a while: no rank is paused.
    """
    from bigsci_launch.slow.answer import who_is_slow, who_waits_least
    from bigsci_launch.spy.look.target import find_target, target_of_process

    if sum(each is not None for each in (run, jobid, pid)) > 1:
        raise click.UsageError("give only one of RUN, --jobid and --pid")
    if {jobid, pid, seconds} == {None} and topology is not None:
        raise click.UsageError("rings have their topology: --topology is for looks, with --for, --jobid or --pid")
    if {jobid, pid, seconds} == {None}:
        found = who_is_slow(run)
    else:
        target = target_of_process(pid) if pid is not None else find_target(run, jobid)
        found = who_waits_least(target, parse_topology(topology), seconds or LOOK_S)
    if as_json:
        console.answer_json(found.document)
    else:
        console.answer_lines(found.lines)
