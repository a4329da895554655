"""Ports on the loopback for clusters that share the machine's network."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from bigsci_launch.errors import ClusterError
from bigsci_launch.minicluster.daemons import wait_until

# Above the rendezvous ports of jobs and local attempts (10000 to 29999), and below the ephemeral range of Linux.
FIRST_PORT = 30000
LAST_PORT = 32767
MUTEX = "\0bsl-minicluster-ports"
MUTEX_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0


@contextmanager
def port_mutex() -> Iterator[None]:
    """Keep other `up`s in this network namespace from choosing ports until our daemons listen on theirs.

    The mutex is an abstract socket, which the kernel frees when we end, however that happens.

    Raises:
        ClusterError: another `up` takes too long.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mutex:
        if not wait_until(lambda: _can_bind(mutex, MUTEX), MUTEX_TIMEOUT_S):
            raise ClusterError(f"another mini cluster on this machine is still starting after {MUTEX_TIMEOUT_S:.0f} s")
        yield


def find_ports(num_ports: int) -> int:
    """Return the first of `num_ports` consecutive free ports.

    Raises:
        ClusterError: there are none.
    """
    for first in count(FIRST_PORT, num_ports):
        if first + num_ports - 1 > LAST_PORT:
            raise ClusterError(f"no {num_ports} consecutive free ports from {FIRST_PORT} to {LAST_PORT}")
        if all(_is_free(port) for port in range(first, first + num_ports)):
            return first
    raise AssertionError("count() does not end")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _can_bind(probe, ("", port))


def _can_bind(endpoint: socket.socket, address: str | tuple[str, int]) -> bool:
    try:
        endpoint.bind(address)
    except OSError:
        return False
    return True


def is_listening(address: str, port: int) -> bool:
    """Whether a connection is accepted there."""
    with socket.socket() as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        return probe.connect_ex((address, port)) == 0
