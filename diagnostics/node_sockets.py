"""Reads TCP queues, retransmits and byte counts of a process, for node_agent.py. Standard library, Python 3.8 or newer.

Queues come from /proc/PID/net/tcp and tcp6, matched with the inodes in /proc/PID/fd. Unacknowledged bytes in `tx`, with
a running retransmit timer, are the sign of a broken link; `rx` is what the process has not read yet. The byte counts
come from the kernel's socket diagnostics (netlink), which answer any user about the sockets of the own network
namespace.
"""

from __future__ import annotations

import os
import sys
import time

from node_processes import read_text

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from typing import Any

    Facts = dict[str, Any]
    Table = dict[str, Facts]

MAX_SOCKETS = 12
MAX_QUIET = 4  # established, both queues empty: they only show who the peers are
MAX_DESCRIPTORS = 4096
MAX_LISTENING = 8
MAX_OPENED = 512  # connections that a process opened itself: in a mesh of N ranks half of N on average, N at most
MAX_DEVICES = 8
NO_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts/", "shm/", "fd/", "log", "console")
CUT = ""  # key in a table that could not be read to its end, in place of an inode
MAX_TABLE_BYTES = 1 << 22
DIAGNOSE_TIMEOUT_S = 0.5
# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and linux/tcp.h.
AF_NETLINK, SOCK_RAW, NETLINK_SOCK_DIAG = 16, 3, 4
NLMSG_ERROR, NLMSG_DONE, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP = 2, 3, 20, 0x301
FAMILIES, IPPROTO_TCP, ESTABLISHED_ONLY = (2, 10), 6, 1 << 1
INET_DIAG_INFO, QUEUES_AT, ATTRIBUTES_AT = 2, 56, 72
BYTES_AT, INFO_BYTES = 120, 136
ROUND_TRIP_AT, SENT_AGAIN_AT, SEGMENTS_AT = 68, 100, 136
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
        if any(len(text) >= MAX_TABLE_BYTES for text in texts):
            known[network][CUT] = {"state": "?"}
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


def read_connections(pid: int, known: dict[str, Table]) -> Facts:
    """Return what shows with which other processes this one is connected, and by how many connections.

    {listening: {address: established connections that came in there}, opened: {host: [port]} of the others, devices}.
    Both ends of a connection report it, one as opened, so that those that came in need only be counted. `devices` are
    open files in /dev other than terminals and the like, at most 8: a process may communicate through them.

    Raises:
        OSError, ValueError: the sockets of the process cannot be read, or not all of them.
    """
    targets = read_targets(pid)
    inodes = {target[8:-1] for target in targets if target.startswith("socket:[")}
    table = read_tables(pid, known)
    sockets = [table[inode] for inode in inodes if inode in table]
    listening = {each["local"]: 0 for each in sockets if each["state"] == "LISTEN"}
    opened: dict[str, list[int]] = {}
    for each in sockets:
        at = listening_at(each["local"], listening) if each["state"] != "LISTEN" else None
        if at is not None:
            listening[at] += each["state"] == "ESTABLISHED"
        elif each["state"] == "ESTABLISHED":
            host, _, port = each["remote"].rpartition(":")
            opened.setdefault(host, []).append(int(port))
    num_opened = sum(len(ports) for ports in opened.values())
    if CUT in table or len(listening) > MAX_LISTENING or num_opened > MAX_OPENED:
        raise ValueError(f"too many sockets ({len(listening)} listen, {num_opened} opened)")
    devices = {target for target in targets if target.startswith("/dev/") and not target[5:].startswith(NO_DEVICES)}
    return {
        "listening": listening,
        "opened": {host: sorted(ports) for host, ports in opened.items()},
        "devices": sorted(devices)[:MAX_DEVICES],
    }


def read_targets(pid: int) -> list[str]:
    """Return what the open files of a process are, each as often as it is open.

    Raises:
        OSError, ValueError: they cannot be read, or are too many.
    """
    names = os.listdir(f"/proc/{pid}/fd")
    if len(names) > MAX_DESCRIPTORS:
        raise ValueError("too many open files")
    targets = []
    for name in names:
        try:
            targets.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue  # it was closed just now
    return targets


def listening_at(local: str, listening: dict[str, int]) -> str | None:
    """Return the listening address at which a connection with this local address came in, or None."""
    port = local.rpartition(":")[2]
    anywhere = (f"0.0.0.0:{port}", f"[0:0:0:0:0:0:0:0]:{port}")
    return next((address for address in (local, *anywhere) if address in listening), None)


def importance(facts: Facts) -> int:
    """3: retransmits; 2: something is queued, or it is neither connected nor listening; 1: connected; 0: listens."""
    if facts.get("retransmits") or facts.get("timer") in ("retransmit", "zero window probe"):
        return 3
    if "tx" in facts or "rx" in facts or facts["state"] not in ("ESTABLISHED", "LISTEN"):
        return 2
    return int(facts["state"] == "ESTABLISHED")


def read_socket_bytes(pid: int, known: Facts) -> Facts | None:
    """Return {sent, received} over the established TCP connections of a process.

    `sent` are the bytes that the process has given to them, and `received` those that it has taken from them, so far.
    None if the process is in another network namespace. `known` caches the connections of this one.

    Raises:
        OSError, ValueError: the process or the connections cannot be read.
    """
    if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
        return None
    if len(os.listdir(f"/proc/{pid}/fd")) > MAX_DESCRIPTORS:
        raise ValueError("too many open files")
    if "connections" not in known:
        known["connections"] = {row[0]: row for family in FAMILIES for row in diagnose(family)}
    rows = [known["connections"][inode] for inode in set(socket_inodes(pid).values()) if inode in known["connections"]]
    return {"sent": sum(row[1] for row in rows), "received": sum(row[2] for row in rows)}


def diagnose(family: int) -> list[tuple[str, int, int, int, int, int]]:
    """Return the established TCP connections of this network namespace.

    [(inode, bytes sent, bytes received, segments sent again, segments sent, round trip in us)], as their owner sees
    them.

    Raises:
        OSError: the kernel does not answer, or does not know these counts.
    """
    import struct
    from _socket import socket

    header = struct.pack("=IHHII", ATTRIBUTES_AT, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0)
    wanted = struct.pack("=BBBBI", family, IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), 0, ESTABLISHED_ONLY)
    rows: list[Any] = []
    until = time.monotonic() + DIAGNOSE_TIMEOUT_S
    connection = socket(AF_NETLINK, SOCK_RAW, NETLINK_SOCK_DIAG)
    try:
        connection.settimeout(DIAGNOSE_TIMEOUT_S)
        connection.send(header + wanted + bytes(ATTRIBUTES_AT - 16 - len(wanted)))
        while time.monotonic() < until:
            data, at = connection.recv(1 << 16), 0
            while at < len(data):
                size, kind = struct.unpack_from("=IH", data, at)
                if kind == NLMSG_DONE:
                    return rows
                if kind == NLMSG_ERROR or size < ATTRIBUTES_AT + 16:
                    raise OSError("the kernel has no socket diagnostics")
                rows.append(parse_connection(data[at + 16 : at + size]))
                at += (size + 3) & ~3
    finally:
        connection.close()
    raise OSError(f"no full answer in {DIAGNOSE_TIMEOUT_S:g} s")


def parse_connection(message: bytes) -> tuple[str, int, int, int, int, int]:
    """Parse an inet_diag_msg with its tcp_info to a row of `diagnose`.

    Bytes that wait in a queue were sent by the process already, but not received by it. A kernel before 4.2 does not
    count segments: then they are 0, and so is the round trip.

    Raises:
        OSError: there is no tcp_info, or it is that of a kernel before 4.1, which does not count bytes.
    """
    import struct

    unread, unacked, _, inode = struct.unpack_from("=IIII", message, QUEUES_AT)
    at = ATTRIBUTES_AT
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if kind == INET_DIAG_INFO and size >= INFO_BYTES + 4:
            acked, arrived = struct.unpack_from("=QQ", message, at + 4 + BYTES_AT)
            again, trip_us, segments = 0, 0, 0
            if size >= SEGMENTS_AT + 8:
                (trip_us,) = struct.unpack_from("=I", message, at + 4 + ROUND_TRIP_AT)
                (again,) = struct.unpack_from("=I", message, at + 4 + SENT_AGAIN_AT)
                (segments,) = struct.unpack_from("=I", message, at + 4 + SEGMENTS_AT)
            return str(inode), acked + unacked, max(0, arrived - unread), again, segments, trip_us
        at += max(4, (size + 3) & ~3)
    raise OSError("the kernel does not count the bytes of connections")
