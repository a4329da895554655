"""`bsl cluster`: a real Slurm on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.boundary import Habitual
from bigsci_launch.cli.options import JSON

if TYPE_CHECKING:
    from bigsci_launch.minicluster.cluster import ClusterStatus
    from bigsci_launch.minicluster.directory import ClusterDir


def _directory() -> ClusterDir:
    from bigsci_launch.minicluster.directory import default_directory

    return default_directory(os.environ)


@click.group(cls=Habitual, epilog="Example: bsl cluster up --nodes 4 --isolated")
def cluster() -> None:
    """A real Slurm on this machine, for trials and tests.

    Everything is stored in $BSL_CLUSTER_DIR (default ~/.bsl-cluster). The cluster has its own munge, ports and
    addresses, so a Slurm that is already installed is not touched.
    """


@cluster.command(epilog="Example: bsl cluster up --nodes 4 --isolated")
@click.option("--nodes", type=click.IntRange(1, 200), required=True, metavar="N", help="Number of nodes.")
@click.option(
    "--gpus-per-node", type=click.IntRange(0, 64), default=2, show_default=True, metavar="N", help="GPUs per node."
)
@click.option("--isolated", is_flag=True, help="Give each node its own PIDs, host name and address. Needs root.")
def up(nodes: int, gpus_per_node: int, isolated: bool) -> None:
    """Start a cluster and wait until its nodes are idle."""
    from bigsci_launch.minicluster.settings import ClusterShape
    from bigsci_launch.minicluster.startup import start_cluster

    directory = _directory()
    with console.progress("starting the cluster", total=nodes) as report_progress:
        made = start_cluster(directory, ClusterShape(nodes, gpus_per_node, isolated), report_progress)
    console.answer(f"export SLURM_CONF={directory.slurm_conf}")
    names = made.nodes[0].name if nodes == 1 else f"{made.nodes[0].name} to {made.nodes[-1].name}"
    console.talk(f"idle: {names}, with {gpus_per_node} GPUs each")
    console.talk('next: type the line above (or: eval "$(bsl cluster up ...)"), then sinfo, srun, sbatch, bsl submit')
    console.talk("      bsl cluster status, bsl cluster down")


@cluster.command(short_help="End the cluster and remove its directory.", epilog="Example: bsl cluster down")
def down() -> None:
    """End every process of the cluster and remove its directory, also after a failed `up`."""
    from bigsci_launch.minicluster.cluster import stop_cluster

    directory = _directory()
    num_processes = stop_cluster(directory)
    if num_processes is None:
        console.talk(f"no cluster in {directory.path}: nothing to do")
    else:
        console.talk(f"ended {num_processes} processes and removed {directory.path}")


@cluster.command(epilog="Example: bsl cluster status --json")
@JSON
@click.pass_context
def status(context: click.Context, as_json: bool) -> None:
    """Show the cluster's nodes. Exit with 1 if it cannot be used."""
    from bigsci_launch.minicluster.cluster import cluster_status

    found = cluster_status(_directory())
    if as_json:
        console.answer_json(_status_document(found))
    else:
        _print_status(found)
    context.exit(1 if found.problem else 0)


def _status_document(found: ClusterStatus) -> dict[str, Any]:
    whole = found.cluster
    return {
        "schema_version": 1,
        "directory": str(found.directory.path),
        "problem": found.problem,
        "slurm_conf": str(found.directory.slurm_conf) if whole else None,
        "isolated": whole.shape.is_isolated if whole else None,
        "gpus_per_node": whole.shape.gpus_per_node if whole else None,
        "nodes": [
            {"name": node.name, "address": node.address, "state": node.state, "running": node.is_running}
            for node in found.nodes
        ],
    }


def _print_status(found: ClusterStatus) -> None:
    if found.nodes:
        rows = [
            (node.name, node.address, node.state, "running" if node.is_running else "ended") for node in found.nodes
        ]
        console.answer_table(("node", "address", "state", "slurmd"), rows)
    if found.problem:
        console.answer(found.problem)
    else:
        console.talk(f"export SLURM_CONF={found.directory.slurm_conf}")


@cluster.command("kill-node", epilog="Example: bsl cluster kill-node n2")
@click.argument("name")
def kill_node_command(name: str) -> None:
    """Kill a node as a power cut would. Isolated clusters only.

    Slurm notices after SlurmdTimeout (10 s).
    """
    from bigsci_launch.minicluster.cluster import kill_node

    kill_node(_directory(), name)
    console.talk(f"{name} is dead; Slurm will mark it down in 10 to 20 s: bsl cluster status")
