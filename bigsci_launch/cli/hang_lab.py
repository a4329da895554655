"""`bsl hang-lab`: real hangs on demand, to see what they look like and what `bsl spy` makes of them."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli.console import answer, answer_json, answer_table, talk
from bigsci_launch.cli.options import JSON

if TYPE_CHECKING:
    from bigsci_launch.hang_lab.runner import Standing, Trial


@click.group(
    "hang-lab", short_help="Reproduce hangs on this machine, without a GPU.", epilog="Example: bsl hang-lab run H36"
)
def hang_lab() -> None:
    """Reproduce hangs of distributed training on this machine, without a GPU.

    Each reproduction is real: gloo processes that hang, wait in the kernel, or only look as if they did.
    """


@hang_lab.command(
    "list",
    short_help="List the classes, and which cannot be reproduced here.",
    epilog="Example: bsl hang-lab list --json",
)
@JSON
def list_classes(as_json: bool) -> None:
    """List the classes, which of them can be reproduced here, and why the others cannot."""
    from bigsci_launch.hang_lab.listing import catalogue_document, catalogue_rows

    if as_json:
        answer_json(catalogue_document())
        return
    columns = ("class", "what", "right answer", "can be reproduced here")
    answer_table(columns, catalogue_rows())


@hang_lab.command(
    short_help="Reproduce a hang, and check the verdict of bsl spy.",
    epilog="Example: bsl hang-lab run H01 --ranks 8 --culprit 5",
)
@click.argument("name", metavar="CLASS")
@click.option("--ranks", default=4, show_default=True, help="Number of ranks: even, and at least 4 for most classes.")
@click.option("--culprit", default=1, show_default=True, help="The rank that causes the hang.")
@click.option("--local/--slurm", "is_local", default=True, show_default=True, help="Where the ranks run.")
@click.option("--recover", is_flag=True, help="Run it with survive and a watcher: is the hang fenced, and by whom?")
@click.option("--hold", is_flag=True, help="Keep the hang until Enter or Ctrl-C, so that you can look at it.")
@JSON
def run(name: str, ranks: int, culprit: int, is_local: bool, recover: bool, hold: bool, as_json: bool) -> None:
    """Reproduce CLASS, run `bsl spy` on it, and compare its verdict with the truth.

    With --recover, it runs as a job with `survive` whose watcher may act, and the fault happens once: a hang whose
    culprit is certain must be fenced and the job must finish, and nothing else may be fenced.

    Leaves nothing behind. Exits with 1 if the verdict accuses an innocent rank, reports a hang where there is none,
    or is wrong in another way.
    """
    from bigsci_launch.hang_lab.comparison import compare
    from bigsci_launch.hang_lab.runner import Trial, reproduce
    from bigsci_launch.hang_lab.slurm_runner import reproduce_on_slurm
    from bigsci_launch.hang_lab.zoo import find_reproduction

    if recover and (hold or not is_local):
        raise click.UsageError("--recover runs on this machine until the job is over: leave out --hold and --slurm")
    signal.signal(signal.SIGTERM, _end)
    reproduction = find_reproduction(name)
    trial = Trial(reproduction, ranks, 0 if reproduction.culprits == "rank 0" else culprit, keeps_rings=True)
    talk(f"{trial.reproduction.name}: {trial.reproduction.title}")
    if recover:
        sys.exit(_recover(trial, as_json=as_json))
    with reproduce(trial) if is_local else reproduce_on_slurm(trial) as standing:
        if hold:
            _hold(standing)
            return
        comparison = compare(standing)
    if as_json:
        answer_json(comparison.document())
    else:
        answer("\n".join(comparison.lines()))
    sys.exit(0 if comparison.is_right else 1)


def _recover(trial: Trial, *, as_json: bool) -> int:
    from bigsci_launch.hang_lab.recovery_play import recover

    judged = recover(trial)
    if as_json:
        answer_json(judged.document())
    else:
        answer("\n".join(judged.lines()))
    return 0 if judged.judgement.is_right else 1


def _hold(standing: Standing) -> None:
    talk(f"{standing.reproduction.name} is ready: {standing.reproduction.title}, {standing.topology}")
    for rank, pid in standing.pids.items():
        answer(f"rank {rank}  pid {pid}")
    answer(f"bsl spy {standing.run.path}")
    talk("Enter or Ctrl-C ends it.")
    sys.stdin.readline()


def _end(_number: int, _frame: FrameType | None) -> None:
    """Exit on TERM by an exception, so that everything is cleaned up."""
    sys.exit(128 + signal.SIGTERM)
