"""Finds a free port for the ranks, on the machine that runs this. Standard library only, Python 3.8 or newer.

A port is not held until rank 0 listens on it: if it is taken in between, rank 0 fails with "address already in use",
and names it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

FIRST_PORT, NUM_PORTS = 10000, 20000
"""Below the ephemeral range of Linux, where any connection could be using a port."""
STRIDE = 997
"""To the next candidate. The neighbours of a port are those of jobs with neighbouring ids, perhaps on the same node."""
FEWEST_PORTS = 1000
MAX_NAMED = 3
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def port_range(ephemeral: Path) -> tuple[int, int]:
    """Return the first port, and the one after the last. Some sites begin their ephemeral range lower."""
    try:
        lowest = int(ephemeral.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, LookupError):
        lowest = FIRST_PORT + NUM_PORTS
    return (
        FIRST_PORT,
        lowest if FIRST_PORT + FEWEST_PORTS <= lowest < FIRST_PORT + NUM_PORTS else FIRST_PORT + NUM_PORTS,
    )


def candidates(wanted: int, ports: tuple[int, int]) -> Iterator[int]:
    """Yield every port of the range once, the wanted one first."""
    first, after = ports
    for number in range(after - first):
        yield first + (wanted - first + number * STRIDE) % (after - first)


def why_taken(port: int) -> str | None:
    """Return why no server can listen on `port` on every address, as the ranks' store does; None if it can."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # this machine has no IPv6
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
                probe.listen(1)
            except OSError as error:
                if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                    return os.strerror(error.errno or errno.EADDRINUSE).lower()
    return None


def reason(wanted: int, port: int, taken: list[tuple[int, str]]) -> str:
    if not taken:
        return f"port {port} instead of {wanted}, which is in the ephemeral range of this machine"
    named = ", ".join(f"{each} ({why})" for each, why in taken[:MAX_NAMED])
    more = f" and {len(taken) - MAX_NAMED} more" if len(taken) > MAX_NAMED else ""
    return f"port {port} instead of {named}{more}"
