"""`bsl nodes`: the nodes that are left out of runs, and the checks that find bad ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import JSON

if TYPE_CHECKING:
    from bigsci_launch.nodes.check import NodeRequest
    from bigsci_launch.nodes.memory import BadNode
    from bigsci_launch.nodes.speeds import OftenSlow


@click.group(
    invoke_without_command=True,
    short_help="Show, add and forgive bad nodes, and check nodes.",
    epilog="Example: bsl nodes",
)
@click.pass_context
def nodes(ctx: click.Context) -> None:
    """The nodes that are left out of the runs under $BSL_RUNS (default: ./runs), and why. Without a command: list them.

    A node is recorded when an attempt shows that its GPU is broken, that Slurm lost it, or that it fails a check. One
    that was slower than its peers in several runs is listed as well, and not left out.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_)


@nodes.command("list", short_help="List the nodes that are left out now.", epilog="Example: bsl nodes list --json")
@JSON
def list_(as_json: bool = False) -> None:
    """List the nodes that are left out now, each with its reason and until when, and those that were often slow."""
    import time

    from bigsci_launch.nodes.evaluate import evaluate_run
    from bigsci_launch.nodes.memory import left_out, read_nodes
    from bigsci_launch.nodes.show import nodes_document
    from bigsci_launch.nodes.speeds import often_slow, read_speeds
    from bigsci_launch.runs.find import runs_root
    from bigsci_launch.runs.layout import find_runs, node_speeds
    from bigsci_launch.scheduler.slurm import cluster_name

    for run in find_runs(runs_root()):
        for line in evaluate_run(run):
            console.talk(line)
    memory = _memory()
    cluster = cluster_name()
    found = left_out(read_nodes(memory), cluster=cluster, now=time.time())
    slow = often_slow(read_speeds(node_speeds(runs_root())), cluster=cluster, now=time.time())
    if as_json:
        console.answer_json(nodes_document(found, str(memory), cluster, slow))
        return
    _show_nodes(found, slow)


def _show_nodes(found: list[BadNode], slow: list[OftenSlow]) -> None:
    from bigsci_launch.nodes.show import NODE_COLUMNS, SPEED_COLUMNS, node_rows, speed_advice, speed_rows
    from bigsci_launch.runs.find import runs_root

    if found:
        console.answer_table(NODE_COLUMNS, node_rows(found))
    else:
        console.talk(f"no node is left out of the runs under {runs_root()}")
    if slow:
        console.answer_table(SPEED_COLUMNS, speed_rows(slow))
        console.talk(speed_advice(slow))


@nodes.command(epilog="Example: bsl nodes add jzxh042 --reason 'one GPU is slow' --days 3")
@click.argument("names", metavar="NODES")
@click.option("--reason", required=True, metavar="TEXT", help="Reason, printed wherever the node is left out.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Default: until it is forgiven.")
def add(names: str, reason: str, days: float | None) -> None:
    """Leave NODES (a Slurm hostlist) out of the next attempts."""
    from bigsci_launch.nodes.memory import add_nodes, make_entry
    from bigsci_launch.nodes.show import entry_line
    from bigsci_launch.scheduler.slurm import cluster_name

    cluster = cluster_name()
    entries = [make_entry(name, "by_hand", reason, cluster=cluster, days=days) for name in _expand(names)]
    add_nodes(_memory(), entries)
    for entry in entries:
        console.answer(f"left out: {entry_line(entry)}")


@nodes.command(epilog="Example: bsl nodes forgive jzxh042")
@click.argument("names", metavar="NODES", required=False)
@click.option("--all", "everything", is_flag=True, help="All nodes of this cluster.")
def forgive(names: str | None, everything: bool) -> None:
    """Use NODES (a Slurm hostlist) again, whatever was wrong with them."""
    from bigsci_launch.errors import RunDirError
    from bigsci_launch.nodes.memory import forgive_nodes
    from bigsci_launch.nodes.show import words_of
    from bigsci_launch.scheduler.slurm import cluster_name

    if (names is None) is not everything:
        raise click.UsageError("give nodes or --all")
    forgiven = forgive_nodes(_memory(), None if names is None else _expand(names), cluster=cluster_name())
    if not forgiven and names is not None:
        raise RunDirError(f"{names}: not remembered as bad in {_memory()}", hint="`bsl nodes` lists those that are")
    for entry in forgiven:
        console.answer(f"forgiven: {entry.node} ({words_of(entry.reason)}: {entry.evidence})")


@nodes.command(short_help="Test nodes in a short job.", epilog="Example: bsl nodes check --nodes 4")
@click.option("--config", type=click.Path(path_type=Path), help="Run file whose partition, account and nodes are used.")
@click.option("--nodes", "number", type=click.IntRange(min=1), metavar="N", help="Any N nodes.")
@click.option("--nodelist", metavar="NODES", help="These nodes, as a Slurm hostlist.")
@JSON
@click.pass_context
def check(ctx: click.Context, config: Path | None, number: int | None, nodelist: str | None, as_json: bool) -> None:
    """Test nodes for some seconds in a short job: GPUs, memory, shared memory, exchanges between nodes.

    A node that fails is left out of later attempts. Exit code 1: a node failed or is slow; 4: a node gave no result.
    """
    from bigsci_launch.nodes.check import check_nodes, exit_code_of_check, failed_nodes
    from bigsci_launch.nodes.memory import add_nodes
    from bigsci_launch.nodes.show import CHECK_COLUMNS, check_advice, check_rows
    from bigsci_launch.scheduler.slurm import cluster_name

    place, memory = _place(config, number, nodelist)
    document = check_nodes(place, console.talk)
    if failed := failed_nodes(document, cluster_name()):
        add_nodes(memory, failed)
    if as_json:
        console.answer_json(document)
    else:
        console.answer_table(CHECK_COLUMNS, check_rows(document))
    for line in check_advice(document):
        console.talk(line)
    ctx.exit(exit_code_of_check(document))


@nodes.command(
    short_help="Find slow nodes by timing a program on groups of them.",
    epilog="Example: bsl nodes bisect --nodes 8 --spares 1 python bench.py",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
@click.option("--config", type=click.Path(path_type=Path), help="Run file whose partition, account and nodes are used.")
@click.option("--nodes", "number", type=click.IntRange(min=2), metavar="N", help="Any N nodes.")
@click.option("--nodelist", metavar="NODES", help="These nodes, as a Slurm hostlist.")
@click.option(
    "--spares", type=click.IntRange(min=1), default=1, show_default=True, metavar="K", help="At most K nodes are slow."
)
@click.option(
    "--smallest",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Fewest nodes that PROGRAM can use; healthy nodes fill up smaller groups.",
)
@JSON
@click.pass_context
def bisect(
    ctx: click.Context,
    program: tuple[str, ...],
    config: Path | None,
    number: int | None,
    nodelist: str | None,
    spares: int,
    smallest: int,
    as_json: bool,
) -> None:
    """Find slow nodes: time PROGRAM on groups of nodes, and cut the slow groups in halves.

    srun starts PROGRAM once on each node of a group; its time is that until the last one has ended. Default: the work
    of `bsl nodes check`. A slow node is left out for a day. Exit code 1: a node is slow.
    """
    from bigsci_launch.nodes.memory import add_nodes
    from bigsci_launch.nodes.search import default_program, find_slow_nodes, slow_entries
    from bigsci_launch.nodes.show import slow_document, slow_lines
    from bigsci_launch.scheduler.slurm import cluster_name

    place, memory = _place(config, number, nodelist)
    chosen = list(program) or default_program()
    found = find_slow_nodes(place, spares, chosen, smallest, console.talk)
    if found.slow:
        add_nodes(memory, slow_entries(found, chosen, cluster_name()))
    if as_json:
        console.answer_json(slow_document(found, spares))
    else:
        console.answer("\n".join(slow_lines(found, spares)))
    ctx.exit(1 if found.slow else 4 if found.unexplained or found.reference_s is None else 0)


def _memory() -> Path:
    from bigsci_launch.runs.find import runs_root
    from bigsci_launch.runs.layout import node_memory

    return node_memory(runs_root())


def _expand(hostlist: str) -> list[str]:
    from bigsci_launch.scheduler.hostlist import expand_hostlist

    try:
        names = expand_hostlist(hostlist)
    except ValueError as error:
        raise click.UsageError(f"{error}; write a Slurm hostlist such as n1 or n[1-4,7]") from error
    if not names:
        raise click.UsageError("name at least one node")
    return names


def _place(config: Path | None, number: int | None, nodelist: str | None) -> tuple[NodeRequest, Path]:
    from bigsci_launch.config.load import load_run
    from bigsci_launch.nodes.check import NodeRequest
    from bigsci_launch.runs.layout import node_memory

    if number is not None and nodelist is not None:
        raise click.UsageError("give --nodes or --nodelist, not both")
    if config is None:
        if number is None and nodelist is None:
            raise click.UsageError("give --nodes, --nodelist or --config")
        return NodeRequest({}, number, nodelist), _memory()
    loaded = load_run(config)
    slurm, site = loaded.config.slurm, loaded.site.config
    names = ("partition", "account", "qos", "reservation", "constraint")
    options = {name: getattr(slurm, name) for name in names}
    if number is None and nodelist is None:
        number, nodelist = slurm.nodes, slurm.nodelist
    return NodeRequest({**options, "gres": site.gres}, number, nodelist), node_memory(Path(loaded.config.run.root))
