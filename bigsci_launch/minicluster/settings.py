"""The values that describe a mini cluster, and the texts of its files. Nothing here touches the machine."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from bigsci_launch.content import packaged
from bigsci_launch.errors import ClusterError
from bigsci_launch.minicluster.directory import ClusterDir

CONTROLLER = "ctl"
CPUS_PER_GPU = 8
# The daemons of an isolated cluster can all use the default ports: each has its own network namespace.
CONTROLLER_PORT = 6817
NODE_PORT = 6818
TEMPLATES = ("slurm.conf", "gres.conf", "cgroup.conf")


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One node: its Slurm name, the host name that slurmd sees, and where it listens."""

    name: str
    hostname: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Subnet:
    """A /24 network known only to the namespaces of one cluster, and this machine's interface in it."""

    interface: str
    prefix: str

    @property
    def network(self) -> str:
        return f"{self.prefix}.0/24"

    @property
    def controller_address(self) -> str:
        return f"{self.prefix}.1"

    @property
    def login_address(self) -> str:
        """The address of this machine, where users call sbatch and srun."""
        return f"{self.prefix}.254"

    def node_address(self, index: int) -> str:
        return f"{self.prefix}.{10 + index}"


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The requested size and kind of a cluster."""

    num_nodes: int
    gpus_per_node: int
    is_isolated: bool


@dataclass(frozen=True, slots=True)
class Cluster:
    """A complete cluster. `interface` is None if the nodes share the machine's network."""

    shape: ClusterShape
    user: str
    controller_hostname: str
    controller_address: str
    controller_port: int
    nodes: tuple[ClusterNode, ...]
    interface: str | None

    def node(self, name: str) -> ClusterNode:
        """Return the node of that name.

        Raises:
            ClusterError: there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise ClusterError(
            f"no node {name} in this cluster", hint=f"its nodes: {', '.join(n.name for n in self.nodes)}"
        )


def node_names(num_nodes: int) -> tuple[str, ...]:
    """Return `n0`, `n1`, ..., zero-padded so that they sort by number."""
    width = len(str(num_nodes - 1))
    return tuple(f"n{index:0{width}d}" for index in range(num_nodes))


def isolated_cluster(shape: ClusterShape, subnet: Subnet, user: str) -> Cluster:
    """Return a cluster whose nodes are namespaces with addresses in `subnet`."""
    return Cluster(
        shape=shape,
        user=user,
        controller_hostname=CONTROLLER,
        controller_address=subnet.controller_address,
        controller_port=CONTROLLER_PORT,
        nodes=tuple(
            ClusterNode(name, name, subnet.node_address(index), NODE_PORT)
            for index, name in enumerate(node_names(shape.num_nodes))
        ),
        interface=subnet.interface,
    )


def shared_cluster(shape: ClusterShape, first_port: int, hostname: str, user: str) -> Cluster:
    """Return a cluster whose nodes are slurmds on this host, on loopback ports `first_port`, `first_port` + 1, ..."""
    return Cluster(
        shape=shape,
        user=user,
        controller_hostname=hostname,
        controller_address="127.0.0.1",
        controller_port=first_port,
        nodes=tuple(
            ClusterNode(name, hostname, "127.0.0.1", first_port + 1 + index)
            for index, name in enumerate(node_names(shape.num_nodes))
        ),
        interface=None,
    )


def hosts_text(cluster: Cluster, machine_hosts: str) -> str:
    """Return what nodes see as /etc/hosts: every node name resolves to its address, as with a site's DNS.

    Nodes that share the host also see the contents of the machine's own file, `machine_hosts`.
    """
    lines = [f"{node.address} {node.name}" for node in cluster.nodes]
    if cluster.shape.is_isolated:
        lines = ["127.0.0.1 localhost", f"{cluster.controller_address} {cluster.controller_hostname}", *lines]
    else:
        lines = [*machine_hosts.splitlines(), *lines]
    return "\n".join([*lines, ""])


def parse_version(text: str) -> tuple[int, int]:
    """Return the year and month of a version of Slurm: (24, 11) of `slurm-wlm 24.11.5`; (0, 0) if it has none."""
    found = re.search(r"\b(\d{2})\.(\d{2})\b", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def configuration_texts(cluster: Cluster, directory: ClusterDir, slurm: tuple[int, int]) -> dict[str, str]:
    """Return the texts of slurm.conf, gres.conf and cgroup.conf by file name, as a version of Slurm takes them."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    folder = packaged("slurm", "minicluster")
    cpus = max(1, cluster.shape.gpus_per_node) * CPUS_PER_GPU
    values = {"cluster": cluster, "directory": directory, "cpus": cpus, "slurm": slurm}
    return {
        name: environment.from_string((folder / f"{name}.j2").read_text(encoding="utf-8")).render(values)
        for name in TEMPLATES
    }


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as a JSON document, which `parse_cluster` reads."""
    return asdict(cluster)


def parse_cluster(document: dict[str, Any]) -> Cluster:
    values = dict(document)
    values["shape"] = ClusterShape(**values["shape"])
    values["nodes"] = tuple(ClusterNode(**node) for node in values["nodes"])
    return Cluster(**values)
