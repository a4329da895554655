"""An existing cluster, complete or half started: reads it, queries it, kills a node, removes it."""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.errors import ClusterError, SlurmError, SlurmUnavailable
from bigsci_launch.minicluster import network
from bigsci_launch.minicluster.daemons import kill_children, kill_cluster_processes, living, read_record
from bigsci_launch.minicluster.directory import ClusterDir
from bigsci_launch.minicluster.ports import is_listening
from bigsci_launch.minicluster.settings import Cluster, parse_cluster
from bigsci_launch.procfs import read_processes
from bigsci_launch.safe_files import read_json
from bigsci_launch.scheduler.slurm import query_nodes


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as Slurm sees it (`unknown` if Slurm does not answer), and whether its slurmd runs."""

    name: str
    address: str
    state: str
    is_running: bool


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The condition of a cluster. `problem` is why it cannot be used, or None."""

    directory: ClusterDir
    cluster: Cluster | None
    nodes: tuple[NodeStatus, ...]
    problem: str | None


def read_cluster(directory: ClusterDir) -> Cluster:
    """Return the cluster in `directory`.

    Raises:
        ClusterError: there is none, or its `up` ended before it wrote the record.
    """
    if not directory.is_cluster:
        raise ClusterError(f"no cluster in {directory.path}", hint="`bsl cluster up --nodes 4` starts one")
    try:
        return parse_cluster(read_json(directory.record))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f"the cluster in {directory.path} never started completely", hint="`bsl cluster down` removes what there is"
        ) from error


def node_states(directory: ClusterDir, cluster: Cluster) -> dict[str, str]:
    """Return the state of each node by name, in Slurm's words, such as `idle` or `down*`.

    Raises:
        SlurmError: slurmctld does not answer.
    """
    # sinfo would keep trying for many seconds.
    if not is_listening(cluster.controller_address, cluster.controller_port):
        raise SlurmUnavailable("slurmctld does not answer")
    hostlist = ",".join(node.name for node in cluster.nodes)
    return {node.name: node.raw_state for node in query_nodes(hostlist, slurm_conf=directory.slurm_conf)}


def cluster_status(directory: ClusterDir) -> ClusterStatus:
    """Return the status of the cluster and its nodes, whatever condition they are in."""
    try:
        cluster = read_cluster(directory)
    except ClusterError as error:
        return ClusterStatus(directory, None, (), error.message)
    states, problem = _ask(directory, cluster)
    running = {recorded.name for recorded in living(read_record(directory), read_processes())}
    nodes = tuple(
        NodeStatus(node.name, node.address, states.get(node.name, "unknown"), node.name in running)
        for node in cluster.nodes
    )
    return ClusterStatus(directory, cluster, nodes, problem)


def _ask(directory: ClusterDir, cluster: Cluster) -> tuple[dict[str, str], str | None]:
    try:
        return node_states(directory, cluster), None
    except SlurmError as error:
        return {}, error.message


def kill_node(directory: ClusterDir, name: str) -> None:
    """Kill PID 1 of an isolated node: all of its processes end at once, as when a machine loses power.

    Raises:
        ClusterError: the nodes are not isolated, no node has that name, or it is already dead.
    """
    cluster = read_cluster(directory)
    node = cluster.node(name)
    if not cluster.shape.is_isolated:
        raise ClusterError(
            f"{name} cannot be killed: its processes run directly on this machine, without a PID 1 of their own",
            hint="`bsl cluster up --isolated` starts nodes that can be killed",
        )
    with directory.locked():
        alive = [
            recorded for recorded in living(read_record(directory), read_processes()) if recorded.name == node.name
        ]
        if not alive or not kill_children(alive[0].pid):
            raise ClusterError(f"{name} is already dead")


def stop_cluster(directory: ClusterDir) -> int | None:
    """Remove the cluster, complete or not. Returns how many processes were ended, or None if there was no cluster.

    Raises:
        ClusterError: a process does not end, or the directory is not a cluster's.
    """
    if not directory.path.exists():
        return None
    with directory.locked():
        if directory.is_cluster:
            return remove_cluster(directory)
        directory.remove_if_empty()
        return None


def remove_cluster(directory: ClusterDir) -> int:
    """End every process of the cluster and delete its directory. Returns how many processes there were."""
    num_processes = kill_cluster_processes(directory)
    network.wait_interface_gone(directory)
    directory.remove()
    return num_processes
