"""Starts a cluster: each daemon after those that it needs. If one fails, everything is removed again."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bigsci_launch.content import packaged
from bigsci_launch.errors import ClusterError, SlurmError
from bigsci_launch.minicluster import network, ports
from bigsci_launch.minicluster.cluster import node_states, remove_cluster
from bigsci_launch.minicluster.daemons import Started, require_programs, run_tool, start_daemon, wait_until
from bigsci_launch.minicluster.directory import ClusterDir, file_mode, folder_mode
from bigsci_launch.minicluster.settings import (
    Cluster,
    ClusterShape,
    cluster_document,
    configuration_texts,
    hosts_text,
    isolated_cluster,
    parse_version,
    shared_cluster,
)
from bigsci_launch.progress import Progress
from bigsci_launch.safe_files import read_file, write_file

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo")
ISOLATION_PROGRAMS = ("ip", "nsenter", "unshare", "mount", "hostname")
START_TIMEOUT_S = 60.0
MACHINE_HOSTS = Path("/etc/hosts")
SCRIPTS = packaged("slurm", "minicluster")


def start_cluster(directory: ClusterDir, shape: ClusterShape, report_progress: Progress) -> Cluster:
    """Start a cluster and wait until every node is idle. Leaves nothing behind if that fails.

    `report_progress` gets the number of nodes that are ready.

    Raises:
        ClusterError: root or a program is missing, others can reach or exchange the directory, there is already a
            cluster, or a daemon does not start.
    """
    _require_rights(shape)
    programs = require_programs([*PROGRAMS, *(ISOLATION_PROGRAMS if shape.is_isolated else ())])
    directory.require_safe_place()
    with directory.locked():
        directory.claim()
        try:
            return _start(directory, shape, programs, report_progress)
        except OSError as error:
            remove_cluster(directory)
            raise ClusterError(f"{error.filename or 'starting the cluster'}: {error.strerror}") from error
        except BaseException:
            remove_cluster(directory)
            raise


def _require_rights(shape: ClusterShape) -> None:
    if shape.is_isolated and os.geteuid() != 0:
        raise ClusterError(
            "isolated nodes are namespaces, which only root can create",
            hint="run it as root, or leave out --isolated",
        )


def _start(directory: ClusterDir, shape: ClusterShape, programs: dict[str, str], report_progress: Progress) -> Cluster:
    report_progress(0, "starting munged")
    for folder in (directory.logs, directory.state, directory.spool, directory.devices):
        folder.mkdir()
    directory.munge.mkdir(mode=folder_mode())
    write_file(directory.munge_key, secrets.token_hex(64), 0o600)
    munged = start_daemon(directory, "munged", munged_argv(directory, programs["munged"]))
    start = _start_isolated if shape.is_isolated else _start_shared
    return start(directory, shape, programs, report_progress, munged)


def _start_isolated(
    directory: ClusterDir, shape: ClusterShape, programs: dict[str, str], report_progress: Progress, munged: Started
) -> Cluster:
    switch = start_daemon(directory, "switch", [programs["unshare"], "--net", "sleep", "infinity"])
    network.require_own_network(switch)
    _require_running(directory, switch)
    cluster = isolated_cluster(shape, network.reserve_subnet(switch, directory), _user())
    _write_files(directory, cluster, programs)
    report_progress(0, "starting nodes")
    argvs = {node.name: isolated_node_argv(directory, node.name, node.address, programs) for node in cluster.nodes}
    nodes = [start_daemon(directory, name, argv) for name, argv in argvs.items()]
    for node in nodes:
        network.require_own_network(node)
        _require_running(directory, node)
    network.connect_nodes(cluster, switch, nodes)
    for node in nodes:
        node.tell()
    controller = start_daemon(directory, "slurmctld", isolated_controller_argv(cluster, switch, programs))
    _wait_ready(directory, cluster, [munged, switch, controller, *nodes], report_progress)
    return cluster


def _start_shared(
    directory: ClusterDir, shape: ClusterShape, programs: dict[str, str], report_progress: Progress, munged: Started
) -> Cluster:
    with ports.port_mutex():
        hostname = socket.gethostname().partition(".")[0]
        cluster = shared_cluster(shape, ports.find_ports(shape.num_nodes + 1), hostname, _user())
        _write_files(directory, cluster, programs)
        report_progress(0, "starting nodes")
        controller = start_daemon(directory, "slurmctld", [programs["slurmctld"], "-D"])
        argvs = {node.name: shared_node_argv(directory, node.name, programs) for node in cluster.nodes}
        nodes = [start_daemon(directory, name, argv) for name, argv in argvs.items()]
        _wait_ready(directory, cluster, [munged, controller, *nodes], report_progress)
    return cluster


def _user() -> str:
    """Return our user name. Not from $USER, which `su` may leave unchanged."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _write_files(directory: ClusterDir, cluster: Cluster, programs: dict[str, str]) -> None:
    slurm = parse_version(run_tool([programs["slurmctld"], "-V"]).stdout)
    configuration = configuration_texts(cluster, directory, slurm)
    texts = {
        directory.record: json.dumps(cluster_document(cluster), indent=2) + "\n",
        directory.hosts: hosts_text(cluster, _machine_hosts()),
        **{directory.configuration(name): text for name, text in configuration.items()},
    }
    for path, text in texts.items():
        write_file(path, text, file_mode())
    for node in cluster.nodes:
        directory.node_spool(node.name).mkdir()
        directory.node_devices(node.name).mkdir()
        for number in range(cluster.shape.gpus_per_node):
            directory.device(node.name, number).touch()


def _machine_hosts() -> str:
    try:
        return MACHINE_HOSTS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "127.0.0.1 localhost\n"


def munged_argv(directory: ClusterDir, program: str) -> list[str]:
    """Return the command of our own munged. Without `--force` it insists on user munge and system directories."""
    paths = {
        "socket": directory.munge_socket,
        "key-file": directory.munge_key,
        "pid-file": directory.munge_pid,
        "seed-file": directory.munge_seed,
        "log-file": directory.munge_log,
    }
    return [program, "--foreground", "--force", "--num-threads=4", *(f"--{key}={path}" for key, path in paths.items())]


def isolated_node_argv(directory: ClusterDir, name: str, address: str, programs: dict[str, str]) -> list[str]:
    """Return the command of an isolated node: its own namespaces, with isolated-node.sh as PID 1."""
    namespaces = ["--pid", "--fork", "--kill-child", "--mount", "--uts", "--net"]
    arguments = [name, f"{address}/24", str(directory.hosts), programs["slurmd"]]
    return [programs["unshare"], *namespaces, "/bin/sh", str(SCRIPTS / "isolated-node.sh"), *arguments]


def shared_node_argv(directory: ClusterDir, name: str, programs: dict[str, str]) -> list[str]:
    """Return the command of a node that shares this host with others."""
    return ["/bin/sh", str(SCRIPTS / "shared-node.sh"), name, str(directory.hosts), programs["slurmd"]]


def isolated_controller_argv(cluster: Cluster, switch: Started, programs: dict[str, str]) -> list[str]:
    """Return the command of slurmctld in the switch's network, under the host name in slurm.conf."""
    become_controller = f'hostname {cluster.controller_hostname} && exec "$0" -D'
    enter = [programs["nsenter"], f"--net=/proc/{switch.pid}/ns/net", programs["unshare"], "--uts"]
    return [*enter, "/bin/sh", "-c", become_controller, programs["slurmctld"]]


def _wait_ready(directory: ClusterDir, cluster: Cluster, started: Sequence[Started], report_progress: Progress) -> None:
    states: dict[str, str] = {}

    def is_ready() -> bool:
        for daemon in started:
            _require_running(directory, daemon)
        with suppress(SlurmError):
            states.update(node_states(directory, cluster))
        num_ready = sum(state == "idle" for state in states.values())
        report_progress(num_ready, "waiting for nodes")
        return num_ready == len(cluster.nodes)

    if not wait_until(is_ready, START_TIMEOUT_S):
        raise _not_ready(directory, cluster, states)


def _not_ready(directory: ClusterDir, cluster: Cluster, states: dict[str, str]) -> ClusterError:
    if not states:
        return ClusterError(
            f"slurmctld does not answer after {START_TIMEOUT_S:.0f} s", hint=f"output: {_tail(directory, 'slurmctld')}"
        )
    late = [node.name for node in cluster.nodes if states.get(node.name) != "idle"]
    return ClusterError(
        f"{len(late)} of {len(cluster.nodes)} nodes are not idle after {START_TIMEOUT_S:.0f} s: {', '.join(late)}",
        hint=f"{late[0]} is {states.get(late[0], 'unknown')}; its output: {_tail(directory, late[0])}",
    )


def _require_running(directory: ClusterDir, daemon: Started) -> None:
    status = daemon.popen.poll()
    if status is not None:
        raise ClusterError(
            f"{daemon.name} ended with exit status {status}", hint=f"output: {_tail(directory, daemon.name)}"
        )


def _tail(directory: ClusterDir, process: str) -> str:
    lines = read_file(directory.output(process)).decode("utf-8", "replace").splitlines()
    return " / ".join(lines[-3:]) or "nothing"
