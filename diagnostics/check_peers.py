"""The test of check_node.py that needs two nodes: in each round every node sums a block of bytes with another one.

The rounds are those of a tournament, so that a slow or broken node is seen by several others. All nodes meet at the
first one, whose port follows from the ids of job and step; the exchanges use a port of each node. This is TCP over the
interface by which the nodes know each other: InfiniBand and NCCL are not tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    Record = dict[str, Any]

MAX_ROUNDS = 8
BLOCK_BYTES = 16 * 2**20
PAIR_TIMEOUT_S = 10.0
NUM_PORTS = 8
"""How many ports the first node may use: other programs have some of them."""


class Place:
    """Which of the nodes of the step this one is."""

    def __init__(self, index: int, hosts: list[str], token: str) -> None:
        self.index, self.hosts, self.token = index, hosts, token

    @property
    def ports(self) -> list[int]:
        seed = sum(ord(letter) * (position + 1) for position, letter in enumerate(self.token))
        return [10000 + (seed * 7919 + number * 2503) % 20000 for number in range(NUM_PORTS)]


def try_peers(node: str, hosts: list[str], deadline: float) -> list[Record]:
    """Exchange blocks with other nodes, and return one record for each exchange. Empty if there is no other node.

    Raises:
        OSError: the nodes did not find each other.
    """
    place = read_place(node, hosts)
    if len(place.hosts) < 2:
        return []
    with socket.create_server(("", 0), backlog=64) as listener:
        met = meet(place, node, listener.getsockname()[1], deadline)
        early: dict[tuple[int, int], socket.socket] = {}
        return [
            exchange(place, met, listener, number, peer, early)
            for number, peer in opponents(place.index, len(place.hosts))
            if time.monotonic() < deadline
        ]


def read_place(node: str, hosts: list[str]) -> Place:
    """Return this node's place from Slurm's variables. A container has no scontrol: `hosts` are then given."""
    environment = os.environ
    token = f"{environment.get('SLURM_JOB_ID', '0')}.{environment.get('SLURM_STEP_ID', '0')}"
    return Place(int(environment.get("SLURM_NODEID", "0")), hosts or ask_hosts(node), token)


def ask_hosts(node: str) -> list[str]:
    """Return the nodes of the step in Slurm's order."""
    environment = os.environ
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or node
    done = subprocess.run(
        ["scontrol", "show", "hostnames", listed], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10
    )
    return done.stdout.split() or [node]


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which everybody meets everybody once (the circle method); an odd one out rests."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]))
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def opponents(index: int, count: int) -> list[tuple[int, int]]:
    """Return the rounds of one node, each with the node that it meets."""
    rounds = enumerate(tournament(count)[:MAX_ROUNDS])
    return [(number, a if b == index else b) for number, pairs in rounds for a, b in pairs if index in (a, b)]


# ------------------------------------------------------------------------------------------- finding each other


def meet(place: Place, node: str, port: int, deadline: float) -> dict[int, Record]:
    """Return node name and port of every node that came, by index. The first node collects and passes them on."""
    own = {"index": place.index, "node": node, "port": port, "token": place.token}
    if place.index == 0:
        return collect(place, own, min(deadline, time.monotonic() + 15))
    while time.monotonic() < deadline:
        for candidate in place.ports:
            try:
                with socket.create_connection((place.hosts[0], candidate), timeout=3) as connection:
                    send_line(connection, own)
                    connection.settimeout(max(1.0, deadline - time.monotonic()))
                    answer = json.loads(read_line(connection))
                    if answer.get("token") == place.token:
                        return {int(index): record for index, record in answer["nodes"].items()}
            except (OSError, ValueError, LookupError, AttributeError):
                continue
        time.sleep(0.1)
    raise OSError(f"the first node, {place.hosts[0]}, was not found")


def collect(place: Place, own: Record, deadline: float) -> dict[int, Record]:
    """Wait for all nodes or until the deadline, and tell everybody who came."""
    met, connections = {0: own}, []
    with listen_on(place.ports) as server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(met) < len(place.hosts) and selector.select(max(0.0, deadline - time.monotonic())):
            connection, _ = server.accept()
            connection.settimeout(3)
            try:
                record = json.loads(read_line(connection))
                if record["token"] == place.token:
                    met[int(record["index"])] = record
                    connections.append(connection)
            except (OSError, ValueError, LookupError, TypeError):
                connection.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                send_line(connection, {"token": place.token, "nodes": met})
            connection.close()
    return met


def listen_on(ports: list[int]) -> socket.socket:
    for port in ports:
        try:
            return socket.create_server(("", port), backlog=1024)
        except OSError:
            continue
    raise OSError(f"all of the ports {ports} are in use")


def send_line(connection: socket.socket, record: Record) -> None:
    connection.sendall(json.dumps(record).encode() + b"\n")


def read_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(65536)
        if not more:
            raise OSError("the connection was closed")
        data += more
    return data


# ------------------------------------------------------------------------------------------- one exchange


def exchange(
    place: Place, met: dict[int, Record], listener: socket.socket, number: int, peer: int, early: dict[Any, Any]
) -> Record:
    """Sum a block with another node, check the sum, and return how fast that was, or why it was not possible."""
    record: Record = {"round": number, "peer": place.hosts[peer], "status": "ok", "value": None, "why": ""}
    if peer not in met:
        return {**record, "status": "not_tried", "why": "it did not come"}
    try:
        with connect(place, met, listener, number, peer, early) as connection:
            return {**record, "value": sum_block(connection, place.index, peer)}
    except (OSError, ValueError) as error:
        return {**record, "status": "failed", "why": str(error) or type(error).__name__}


def connect(
    place: Place, met: dict[int, Record], listener: socket.socket, number: int, peer: int, early: dict[Any, Any]
) -> socket.socket:
    """Return the connection of a pair for a round: the lower of the two accepts it."""
    deadline = time.monotonic() + PAIR_TIMEOUT_S
    if place.index > peer:
        connection = socket.create_connection((place.hosts[peer], met[peer]["port"]), timeout=PAIR_TIMEOUT_S)
        send_line(connection, {"token": place.token, "round": number, "index": place.index})
        return connection
    while (number, peer) not in early:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(PAIR_TIMEOUT_S)
        hello = json.loads(read_hello(connection))
        early[hello["round"], hello["index"]] = connection
    return early.pop((number, peer))  # type: ignore[no-any-return]


def read_hello(connection: socket.socket) -> bytes:
    """Read a line and nothing after it: the block follows."""
    data = b""
    while not data.endswith(b"\n"):
        letter = connection.recv(1)
        if not letter:
            raise OSError("the connection was closed")
        data += letter
    return data


def sum_block(connection: socket.socket, index: int, peer: int) -> float:
    """Send this node's block, receive the other's, compare it with what it must be, and return MiB/s.

    The clock runs once both are here: the time for which a node waits for a busy one is not its own.
    """
    connection.settimeout(PAIR_TIMEOUT_S)
    connection.sendall(b"!")
    if connection.recv(1) != b"!":
        raise OSError("the connection was closed")
    own, expected = block_of(index), block_of(peer)
    began = time.perf_counter()
    sender = threading.Thread(target=send_quietly, args=(connection, own), daemon=True)
    sender.start()
    received = bytearray(BLOCK_BYTES)
    view, filled = memoryview(received), 0
    while filled < BLOCK_BYTES:
        count = connection.recv_into(view[filled:])
        if not count:
            raise OSError("the connection was closed")
        filled += count
    sender.join(PAIR_TIMEOUT_S)
    seconds = time.perf_counter() - began
    if received != expected:
        raise OSError("what arrived is not what was sent")
    return 2 * BLOCK_BYTES / 2**20 / seconds


def send_quietly(connection: socket.socket, block: bytes) -> None:
    with contextlib.suppress(OSError):  # the receiving side says what is wrong
        connection.sendall(block)


def block_of(index: int) -> bytes:
    return bytes((value + index) % 256 for value in range(256)) * (BLOCK_BYTES // 256)
