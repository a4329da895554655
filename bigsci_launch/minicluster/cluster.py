"""The four verbs: up, down, status, kill-node."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.errors import ClusterError
from bigsci_launch.minicluster import network, ports
from bigsci_launch.minicluster.directory import ClusterDir
from bigsci_launch.minicluster.processes import (
    Started,
    kill_cluster_processes,
    kill_descendants,
    living,
    read_record,
    require_programs,
    run_tool,
    start_daemon,
    wait_until,
)
from bigsci_launch.minicluster.proctree import read_processes
from bigsci_launch.minicluster.settings import (
    Cluster,
    Shape,
    cluster_document,
    configuration_texts,
    hosts_text,
    isolated_cluster,
    parse_cluster,
    require_shape,
    shared_cluster,
)

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo")
ISOLATION_PROGRAMS = ("ip", "nsenter", "unshare", "mount", "hostname")
START_TIMEOUT_S = 60.0
NODE_INIT = "assets/slurm/minicluster/node-init.sh"

# Told how far the start is: ready nodes, and what is done now.
Report = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as Slurm sees it, and whether its slurmd runs."""

    name: str
    address: str
    state: str
    is_running: bool


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A cluster as it is found. `problem` says why it cannot be used, or is None."""

    directory: Path
    cluster: Cluster | None
    nodes: tuple[NodeStatus, ...]
    problem: str | None


def start_cluster(directory: ClusterDir, shape: Shape, report: Report) -> Cluster:
    """Start a cluster and wait until every node is idle; when that fails, everything is removed again.

    Raises:
        ClusterError: root or a program is missing, a cluster is there already, or a daemon does not start.
    """
    require_shape(shape)
    _require_rights(shape)
    programs = require_programs([*PROGRAMS, *(ISOLATION_PROGRAMS if shape.is_isolated else ())])
    with directory.locked():
        directory.claim()
        try:
            return _start(directory, shape, programs, report)
        except BaseException:
            _remove(directory)
            raise


def _require_rights(shape: Shape) -> None:
    if shape.is_isolated and os.geteuid() != 0:
        raise ClusterError(
            "isolated nodes are namespaces, and only root may make those",
            hint="run it as root, or leave out --isolated",
        )


def _start(directory: ClusterDir, shape: Shape, programs: dict[str, str], report: Report) -> Cluster:
    report(0, "starting munged")
    for folder in (directory.logs, directory.state, directory.spool, directory.devices):
        folder.mkdir()
    directory.munge_key.touch(mode=0o400)
    directory.munge_key.write_bytes(secrets.token_bytes(128))
    munged = start_daemon(directory, "munged", munged_argv(directory, programs["munged"]))
    start = _start_isolated if shape.is_isolated else _start_shared
    return start(directory, shape, programs, report, [munged])


def _start_isolated(
    directory: ClusterDir, shape: Shape, programs: dict[str, str], report: Report, started: list[Started]
) -> Cluster:
    switch = start_daemon(directory, "switch", [programs["unshare"], "--net", "sleep", "infinity"])
    network.require_own_network(switch)
    cluster = isolated_cluster(shape, network.reserve_subnet(switch, directory), getpass.getuser())
    _write_files(directory, cluster)
    report(0, "starting nodes")
    nodes = [
        start_daemon(directory, node.name, node_argv(directory, node.address, node.name, programs))
        for node in cluster.nodes
    ]
    for node in nodes:
        network.require_own_network(node)
    network.connect_nodes(cluster, switch, nodes)
    for node in nodes:
        node.tell()
    controller = start_daemon(directory, "slurmctld", isolated_controller_argv(cluster, switch, programs))
    _wait_ready(directory, cluster, [*started, switch, controller, *nodes], report)
    return cluster


def _start_shared(
    directory: ClusterDir, shape: Shape, programs: dict[str, str], report: Report, started: list[Started]
) -> Cluster:
    with ports.port_mutex():
        first_port = ports.find_ports(shape.num_nodes + 1)
        cluster = shared_cluster(shape, first_port, socket.gethostname().partition(".")[0], getpass.getuser())
        _write_files(directory, cluster)
        report(0, "starting nodes")
        controller = start_daemon(directory, "slurmctld", [programs["slurmctld"], "-D"])
        nodes = [
            start_daemon(directory, node.name, [programs["slurmd"], "-D", "-N", node.name]) for node in cluster.nodes
        ]
        _wait_ready(directory, cluster, [*started, controller, *nodes], report)
    return cluster


def _write_files(directory: ClusterDir, cluster: Cluster) -> None:
    directory.record.write_text(json.dumps(cluster_document(cluster), indent=2) + "\n", encoding="utf-8")
    directory.hosts.write_text(hosts_text(cluster), encoding="utf-8")
    for name, text in configuration_texts(cluster, directory).items():
        (directory.path / name).write_text(text, encoding="utf-8")
    for node in cluster.nodes:
        directory.node_spool(node.name).mkdir()
        directory.node_devices(node.name).mkdir()
        for number in range(cluster.shape.gpus_per_node):
            (directory.node_devices(node.name) / f"gpu{number}").touch()


def munged_argv(directory: ClusterDir, program: str) -> list[str]:
    """A munged of our own; `--force` because it would rather run as user munge, in system directories."""
    files = {
        "socket": directory.munge_socket,
        "key-file": directory.munge_key,
        "pid-file": directory.path / "munge.pid",
        "seed-file": directory.path / "munge.seed",
        "log-file": directory.logs / "munged.log",
    }
    return [program, "--foreground", "--force", "--num-threads=4", *(f"--{key}={path}" for key, path in files.items())]


def node_argv(directory: ClusterDir, address: str, name: str, programs: dict[str, str]) -> list[str]:
    """An isolated node: namespaces of its own, with node-init.sh as PID 1."""
    script = Path(__file__).parent.parent / NODE_INIT
    namespaces = ["--pid", "--fork", "--kill-child", "--mount", "--uts", "--net"]
    return [
        programs["unshare"],
        *namespaces,
        "/bin/sh",
        str(script),
        name,
        f"{address}/24",
        str(directory.hosts),
        programs["slurmd"],
    ]


def isolated_controller_argv(cluster: Cluster, switch: Started, programs: dict[str, str]) -> list[str]:
    """slurmctld inside the switch's network, under a host name that slurm.conf can name."""
    inner = f'hostname {cluster.controller_hostname} && exec "$0" -D'
    enter = [programs["nsenter"], f"--net=/proc/{switch.pid}/ns/net"]
    return [*enter, programs["unshare"], "--uts", "/bin/sh", "-c", inner, programs["slurmctld"]]


def _wait_ready(directory: ClusterDir, cluster: Cluster, started: Sequence[Started], report: Report) -> None:
    def is_ready() -> bool:
        _require_running(directory, started)
        if not ports.is_listening(cluster.controller_address, cluster.controller_port):
            return False
        states = query_states(directory)
        num_ready = sum(state == "idle" for state in states.values())
        report(num_ready, "waiting for nodes")
        return num_ready == len(cluster.nodes)

    if not wait_until(is_ready, START_TIMEOUT_S):
        raise ClusterError(
            f"the cluster is not ready after {START_TIMEOUT_S:.0f} s", hint=_tail(directory, "slurmctld")
        )


def _require_running(directory: ClusterDir, started: Sequence[Started]) -> None:
    for daemon in started:
        if daemon.popen.poll() is not None:
            raise ClusterError(f"{daemon.name} ended at once", hint=_tail(directory, daemon.name))


def _tail(directory: ClusterDir, process: str) -> str:
    lines = directory.output(process).read_text(encoding="utf-8", errors="replace").splitlines()
    return " / ".join(lines[-3:]) or "it said nothing"


def query_states(directory: ClusterDir) -> dict[str, str]:
    """Node -> state as `sinfo` names it; empty when slurmctld does not answer."""
    done = run_tool(["env", f"SLURM_CONF={directory.slurm_conf}", "sinfo", "-h", "-N", "-o", "%N %T"])
    return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}


def stop_cluster(directory: ClusterDir) -> int | None:
    """Remove the cluster, whole or half; how many processes were ended, or None when there was nothing.

    Raises:
        ClusterError: a process does not end, or the directory is not a cluster's.
    """
    if not directory.path.exists():
        return None
    with directory.locked():
        return _remove(directory)


def _remove(directory: ClusterDir) -> int:
    num_processes = kill_cluster_processes(directory)
    network.wait_interface_gone(directory)
    directory.remove()
    return num_processes


def read_cluster(directory: ClusterDir) -> Cluster:
    """The cluster in `directory`.

    Raises:
        ClusterError: there is none, or only half of one.
    """
    if not directory.is_cluster:
        raise ClusterError(f"no cluster in {directory.path}", hint="`bsl cluster up --nodes 4` starts one")
    try:
        return parse_cluster(json.loads(directory.record.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f"the cluster in {directory.path} was never whole", hint="`bsl cluster down` removes what there is"
        ) from error


def cluster_status(directory: ClusterDir) -> ClusterStatus:
    """The cluster and its nodes, whatever condition they are in."""
    empty = ClusterStatus(directory.path, None, (), None)
    try:
        cluster = read_cluster(directory)
    except ClusterError as error:
        return replace(empty, problem=error.message)
    running = {recorded.name for recorded in living(read_record(directory), read_processes())}
    answers = ports.is_listening(cluster.controller_address, cluster.controller_port)
    states = query_states(directory) if answers else {}
    nodes = tuple(
        NodeStatus(node.name, node.address, states.get(node.name, "unknown"), node.name in running)
        for node in cluster.nodes
    )
    return replace(empty, cluster=cluster, nodes=nodes, problem=None if answers else "slurmctld does not answer")


def kill_node(directory: ClusterDir, name: str) -> None:
    """Kill PID 1 of an isolated node: all of its processes end at once, as when a machine loses power.

    Raises:
        ClusterError: the nodes are not isolated, there is none of that name, or it is dead.
    """
    cluster = read_cluster(directory)
    node = cluster.node(name)
    if not cluster.shape.is_isolated:
        raise ClusterError(
            f"{name} cannot be killed: its processes are this machine's, with no PID 1 of their own",
            hint="`bsl cluster up --isolated` makes nodes that can be killed",
        )
    with directory.locked():
        alive = [r for r in living(read_record(directory), read_processes()) if r.name == node.name]
        if not alive or not kill_descendants(alive[0].pid):
            raise ClusterError(f"{name} is dead already")
