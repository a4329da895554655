"""`bsl trace`: the last calls of every rank, also of ranks that are gone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.boundary import Habitual
from bigsci_launch.cli.options import RUN_OR_FOLDER, RUN_REQUIRED
from bigsci_launch.errors import CollectError

if TYPE_CHECKING:
    from bigsci_launch.runs.control.request import Request

NUM_SHOWN = 32
NOTHING = "no rank left a record of its last calls"
NOTHING_TRACED = (
    "the program called none of their functions, did not reach the step or call that starts the trace, or ignores "
    "PYTHONPATH (python -I, -E)"
)
WHY_NOTHING = "ranks that end well leave none, and `monitor.ring: none` keeps none"


@click.group(cls=Habitual, short_help="Show what every rank called last.", epilog="Example: bsl trace last demo")
def trace() -> None:
    """Show what every rank called last, also if its process can no longer answer."""


@trace.command(
    short_help="Print the last calls of all ranks, the odd ranks first.",
    epilog="Example: bsl trace last demo -n 5",
)
@RUN_OR_FOLDER
@click.option(
    "-n", "count", type=click.IntRange(1, NUM_SHOWN), default=8, show_default=True, help="Number of calls per rank."
)
@click.option("--attempt", "name", metavar="NAME", help="This attempt, such as 0001; default: the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON document.")
def last(run: str | None, count: int, name: str | None, as_json: bool) -> None:
    """Print the last calls of torch.distributed, of saving and of data of every rank of RUN (a name or a directory;
    default: the run submitted last), or those in a FOLDER of rings. Where calls of packages are traced, they are
    among them.

    Ranks that ended badly left a copy in the run. Those of ranks that still run are read on their nodes.
    """
    from bigsci_launch.trace.last import document_of, group_ranks, words_of
    from bigsci_launch.trace.read import read_ranks

    ranks = read_ranks(run, name, NUM_SHOWN)
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
@RUN_OR_FOLDER
@click.option("--perfetto", "file", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The file.")
@click.option("--attempt", "name", metavar="NAME", help="This attempt, such as 0001; default: the newest.")
def export(run: str | None, file: Path, name: str | None) -> None:
    """Write the rings and call traces of RUN, or those in a FOLDER, as one file.

    Ranks are processes, threads are threads, and an arrow runs through the ranks of each collective, from the first
    that came to the last. A copy that a rank has left holds thousands of calls; of a rank that still runs, the newest
    32 of each thread are read. `bsl trace off` leaves a copy.
    """
    from bigsci_launch.trace.export import write_trace
    from bigsci_launch.trace.read import ALL_CALLS, read_ranks

    ranks = read_ranks(run, name, ALL_CALLS)
    for each in ranks:
        if each.why is not None:
            console.talk(f"{each.name}: not known: {each.why}")
    if not any(each.is_known for each in ranks):
        raise CollectError(NOTHING, hint=WHY_NOTHING)
    done = write_trace(ranks, file)
    processes = "process" if done.num_processes == 1 else "processes"
    console.talk(f"{file}: {done.num_calls} calls of {done.num_processes} {processes}; open it at ui.perfetto.dev")


def trace_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what is traced, and from when on."""
    for option in (
        click.option("--from-call", metavar="MODULE:FUNCTION", help="Start when this function is first called."),
        click.option("--from-step", type=click.IntRange(1), metavar="STEP", help="Start with this step."),
        click.option(
            "--include", required=True, metavar="PACKAGE[,PACKAGE]", help="Packages and modules whose calls are traced."
        ),
    ):
        command = option(command)
    return command


@trace.command(
    short_help="Run a program, and trace its calls.",
    epilog="Example: bsl trace run --include megatron,__main__ -- python train.py",
    context_settings={"allow_interspersed_args": False},
)
@trace_options
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Where the traces are kept; default: bsl-trace-DATE-TIME.",
)  # fmt: skip
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGUMENT]...")
def run(
    include: str, from_step: int | None, from_call: str | None, output: Path | None, program: tuple[str, ...]
) -> None:
    """Run PROGRAM on this machine, and keep the newest calls of functions of the included packages.

    Each of its Python processes writes a file of fixed size, which outlives it. `__main__` is the program itself.
    The exit code is that of the program.
    """
    from bigsci_launch.runs.control.ask import parse_trace
    from bigsci_launch.trace.read import files_in
    from bigsci_launch.trace.run import run_traced

    folder = output or Path(time.strftime("bsl-trace-%Y%m%d-%H%M%S"))
    code = run_traced(folder, parse_trace(include, from_step, from_call), program)
    traces = [file for file in files_in(folder) if file.suffix == ".calls"]
    if traces:
        console.talk(f"calls of {len(traces)} process{'es' if len(traces) > 1 else ''}: bsl trace last {folder}")
    else:
        console.talk(f"no calls of {include} were recorded: {NOTHING_TRACED}")
    sys.exit(code)


@trace.command(
    short_help="Start tracing calls in a running run.", epilog="Example: bsl trace on demo --include megatron.core"
)
@RUN_REQUIRED
@trace_options
def on(run: str, include: str, from_step: int | None, from_call: str | None) -> None:
    """Have every rank of RUN trace the calls of the included packages, from within ten seconds on.

    A trace that is already on ends. `bsl trace last RUN` shows the calls, and `bsl trace off RUN` copies them into the
    run.
    """
    from bigsci_launch.runs.control.ask import parse_trace

    _ask(run, parse_trace(include, from_step, from_call))
    console.talk(f"ranks of {run} trace calls of {include} within ten seconds: bsl trace last {run}")


@trace.command(short_help="Stop tracing calls in a running run.", epilog="Example: bsl trace off demo")
@RUN_REQUIRED
def off(run: str) -> None:
    """Have every rank of RUN stop tracing within ten seconds, and copy its trace into the run."""
    from bigsci_launch.runs.control.request import trace_request

    _ask(run, trace_request(()))
    console.talk(f"ranks of {run} stop tracing within ten seconds; then: bsl trace export {run} --perfetto FILE")


def _ask(run: str, request: Request) -> None:
    from bigsci_launch.runs.control.ask import ask_to_trace
    from bigsci_launch.runs.find import find_attempt, find_run

    ask_to_trace(find_attempt(find_run(run)), request)
