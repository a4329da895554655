"""The network of an isolated cluster, 10.213.N.0/24.

    this machine, bslN [.254] === uplink (switch namespace: br0 [.1], slurmctld) n0 === eth0 [.10] (node n0), ...

Only `bslN` is visible outside. It is one end of a cable (a veth pair), so it disappears with the switch's namespace,
that is, with the only process in it: there is no bridge, route or named namespace to clean up. Creating `bslN` also
reserves subnet N, because the kernel refuses a second interface of that name. Its hardware address identifies the
cluster.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, ip_network
from pathlib import Path

from bigsci_launch.errors import ClusterError
from bigsci_launch.minicluster.daemons import Started, require_tool, run_tool, wait_until
from bigsci_launch.minicluster.directory import ClusterDir
from bigsci_launch.minicluster.settings import Cluster, Subnet
from bigsci_launch.safe_files import parse_json

NAMESPACE_TIMEOUT_S = 20.0
# Fixed, because by default a bridge takes the lowest address of its ports, and a new one when that node dies. The nodes
# would then keep using the old address for a while, and could not reach slurmctld.
BRIDGE_ADDRESS = "02:00:00:00:00:01"


def subnet(number: int) -> Subnet:
    """Return test subnet `number`, 0 to 255."""
    return Subnet(interface=f"bsl{number}", prefix=f"10.213.{number}")


def free_subnets(used: Sequence[IPv4Network]) -> Iterable[Subnet]:
    """Return every test subnet that overlaps none of `used`."""
    candidates = (subnet(number) for number in range(256))
    return (one for one in candidates if not any(IPv4Network(one.network).overlaps(other) for other in used))


def parse_routes(text: str) -> list[IPv4Network]:
    """Parse the networks in the output of `ip -json -4 route show table all`, without the default route."""
    destinations = [route["dst"] for route in parse_json(text or "[]")]
    return [IPv4Network(ip_network(dst, strict=False)) for dst in destinations if dst != "default"]


def reserve_subnet(switch: Started, directory: ClusterDir) -> Subnet:
    """Plug a cable from this machine into the switch, in the first free test subnet.

    Raises:
        ClusterError: none is free, or the kernel refuses.
    """
    used = parse_routes(require_tool(["ip", "-json", "-4", "route", "show", "table", "all"]))
    for candidate in free_subnets(used):
        ours = ["ip", "link", "add", candidate.interface, "address", hardware_address(directory)]
        done = run_tool([*ours, "type", "veth", "peer", "name", "uplink", "netns", str(switch.pid)])
        if done.returncode == 0:
            require_tool(["ip", "-batch", "-"], text=login_batch(candidate))
            return candidate
        if "File exists" not in done.stderr:
            raise ClusterError(f"ip link add {candidate.interface}: {done.stderr.strip()}")
    raise ClusterError("no test subnet 10.213.N.0/24 is free", hint="`ip route` shows what is in use")


def hardware_address(directory: ClusterDir) -> str:
    """Return the locally administered hardware address for the interface of the cluster in `directory`."""
    digest = hashlib.sha256(str(directory.path).encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (0x02, *digest[:5]))


def wait_interface_gone(directory: ClusterDir) -> None:
    """Wait until the kernel has removed the cluster's interface, a moment after the last process has ended.

    Raises:
        ClusterError: the interface is still there.
    """
    address = hardware_address(directory)
    if not wait_until(lambda: address not in _hardware_addresses(), NAMESPACE_TIMEOUT_S):
        raise ClusterError(f"the interface with address {address} is still there", hint="`ip link` shows it")


def _hardware_addresses() -> set[str]:
    # /sys/class/net is not used: inside a network namespace it may still show the interfaces of another.
    if not any(name.startswith("bsl") for _, name in socket.if_nameindex()):
        return set()
    return {link.get("address", "") for link in parse_json(require_tool(["ip", "-json", "link", "show"]))}


def login_batch(subnet: Subnet) -> str:
    """Return `ip -batch` lines that give this machine its address in the subnet."""
    name = subnet.interface
    return f"address add {subnet.login_address}/24 dev {name}\nlink set {name} up\n"


def switch_batch(cluster: Cluster, node_pids: Sequence[int]) -> str:
    """Return `ip -batch` lines for the switch's namespace that plug in every node; `node_pids` in the nodes' order."""
    lines = [
        "link set lo up",
        f"link add br0 address {BRIDGE_ADDRESS} type bridge",
        "link set uplink master br0",
        "link set uplink up",
        f"address add {cluster.controller_address}/24 dev br0",
        "link set br0 up",
    ]
    for node, pid in zip(cluster.nodes, node_pids, strict=True):
        lines += [
            f"link add {node.name} type veth peer name eth0 netns {pid}",
            f"link set {node.name} master br0",
            f"link set {node.name} up",
        ]
    return "\n".join([*lines, ""])


def connect_nodes(cluster: Cluster, switch: Started, nodes: Sequence[Started]) -> None:
    enter = ["nsenter", f"--net=/proc/{switch.pid}/ns/net"]
    require_tool([*enter, "ip", "-batch", "-"], text=switch_batch(cluster, [node.pid for node in nodes]))


def require_own_network(started: Started) -> None:
    """Wait until the process has its own network namespace, or has ended: a cable plugged in earlier would end in ours.

    Raises:
        ClusterError: it takes too long.
    """
    ours = str(Path("/proc/self/ns/net").readlink())

    def is_settled() -> bool:
        return started.popen.poll() is not None or _network_of(started.pid) not in (ours, None)

    if not wait_until(is_settled, NAMESPACE_TIMEOUT_S):
        raise ClusterError(
            f"{started.name}: the kernel gave it no network namespace",
            hint="containers often forbid that: run on the machine itself, or leave out --isolated",
        )


def _network_of(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None
