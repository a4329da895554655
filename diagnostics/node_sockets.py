"""Reads TCP queues and retransmits of a process, for node_agent.py. Standard library only, Python 3.8 or newer.

They come from /proc/PID/net/tcp and tcp6, matched with the inodes in /proc/PID/fd. Unacknowledged bytes in `tx`, with a
running retransmit timer, are the sign of a broken link; `rx` is what the process has not read yet.
"""

from __future__ import annotations

import os
import sys

from node_processes import read_text

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from typing import Any

    Facts = dict[str, Any]
    Table = dict[str, Facts]

MAX_SOCKETS = 12
MAX_QUIET = 4  # established, both queues empty: they only show who the peers are
MAX_DESCRIPTORS = 4096
MAX_TABLE_BYTES = 1 << 22
# include/net/tcp_states.h and Documentation/networking/proc_net_tcp.rst of the kernel.
STATES = [
    "?", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE", "CLOSE_WAIT",
    "LAST_ACK", "LISTEN", "CLOSING",
]  # fmt: skip
TIMERS = {1: "retransmit", 2: "keepalive", 3: "time-wait", 4: "zero window probe"}


def parse_address(text: str) -> str:
    """Parse `0100007F:1F90` to `127.0.0.1:8080`: 32-bit words in the byte order of the machine."""
    hexadecimal, _, port = text.partition(":")
    words = [bytes.fromhex(hexadecimal[start : start + 8]) for start in range(0, len(hexadecimal), 8)]
    raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    if len(raw) == 16 and raw[:12] != b"\0" * 10 + b"\xff\xff":
        groups = ":".join(f"{raw[at] << 8 | raw[at + 1]:x}" for at in range(0, 16, 2))
        return f"[{groups}]:{int(port, 16)}"
    return ".".join(str(byte) for byte in raw[-4:]) + f":{int(port, 16)}"


def parse_table(text: str) -> Table:
    """Parse /proc/net/tcp to {inode: facts}; zeros are left out."""
    table = {}
    for line in text.splitlines()[1:]:
        field = line.split()
        if len(field) > 9 and field[9] != "0":
            table[field[9]] = parse_line(field)
    return table


def parse_line(field: list[str]) -> Facts:
    """Parse one socket: {local, remote, state, tx, rx, timer, retransmits}."""
    state, timer = int(field[3], 16), int(field[5].partition(":")[0], 16)
    queued, _, unread = field[4].partition(":")
    facts = {
        "local": parse_address(field[1]),
        "remote": parse_address(field[2]),
        "state": STATES[state] if state < len(STATES) else str(state),
        "tx": int(queued, 16),
        "rx": int(unread, 16),
        "timer": TIMERS.get(timer),
        "retransmits": int(field[6], 16),
    }
    return {name: value for name, value in facts.items() if value}


def read_tables(pid: int, known: dict[str, Table]) -> Table:
    """Return the TCP sockets of the network that `pid` sees; `known` caches the tables that were read before."""
    try:
        network = os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        network = str(pid)
    if network not in known:
        texts = [read_text(f"/proc/{pid}/net/{name}", MAX_TABLE_BYTES) or "" for name in ("tcp", "tcp6")]
        known[network] = {inode: facts for text in texts for inode, facts in parse_table(text).items()}
    return known[network]


def socket_inodes(pid: int) -> dict[int, str]:
    """Return {file descriptor: inode} of the sockets of a process.

    Raises:
        OSError: its descriptors cannot be read.
    """
    inodes = {}
    for name in os.listdir(f"/proc/{pid}/fd")[:MAX_DESCRIPTORS]:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue  # it was closed just now
        if target.startswith("socket:["):
            inodes[int(name)] = target[8:-1]
    return inodes


def read_sockets(pid: int, known: dict[str, Table]) -> Facts:
    """Return {count, list: [{fd, local, remote, state, tx, rx, timer, retransmits}]}, busy ones first, at most 12.

    Raises:
        OSError: the descriptors of the process cannot be read.
    """
    inodes, table = socket_inodes(pid), read_tables(pid, known)
    sockets = [dict(table[inode], fd=descriptor) for descriptor, inode in inodes.items() if inode in table]
    sockets.sort(key=lambda each: (-importance(each), each["fd"]))
    num_busy = sum(importance(each) > 1 for each in sockets)
    return {"count": len(sockets), "list": sockets[: min(MAX_SOCKETS, num_busy + MAX_QUIET)]}


def importance(facts: Facts) -> int:
    """3: retransmits; 2: something is queued, or it is neither connected nor listening; 1: connected; 0: listens."""
    if facts.get("retransmits") or facts.get("timer") in ("retransmit", "zero window probe"):
        return 3
    if "tx" in facts or "rx" in facts or facts["state"] not in ("ESTABLISHED", "LISTEN"):
        return 2
    return int(facts["state"] == "ESTABLISHED")
