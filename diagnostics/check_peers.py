"""The test of check_node.py that needs two nodes: in each round every node sums a block of bytes with another one.

The rounds are those of a tournament, so that a slow or broken node is seen by several others. All nodes meet at the
first one, whose port follows from the token of the step, BSL_CHECK_TOKEN; the exchanges use a port of each node. Only
who has the token is let in: see door.py. This is TCP over the interface by which the nodes know each other: InfiniBand
and NCCL are not tried.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from door import Door, call, listen_at, prove, read_line

if TYPE_CHECKING:
    from typing import Any

    from door import Guest

    Record = dict[str, Any]

TOKEN = "BSL_CHECK_TOKEN"
MAX_ROUNDS = 8
BLOCK_BYTES = 16 * 2**20
PAIR_TIMEOUT_S = 10.0
CALL_TIMEOUT_S, CALL_AGAIN_S = 3.0, 0.2
POLL_S = 0.2
LONGEST_ANSWER = 1 << 20
"""Bytes of the list of nodes that the first node sends to those that it let in."""
NUM_PORTS = 8
"""How many ports the first node may use: other programs have some of them."""


class Place:
    """Which of the nodes of the step this one is. `token` is a secret of the step."""

    def __init__(self, index: int, hosts: list[str], token: str) -> None:
        self.index, self.hosts, self.token = index, hosts, token

    @property
    def ports(self) -> list[int]:
        """Where the first node may listen. The token cannot be guessed from them."""
        seed = int(prove(self.token, b"ports"), 16)
        return [10000 + (seed + number * 2503) % 20000 for number in range(NUM_PORTS)]

    def listen(self, port: int = 0) -> list[socket.socket]:
        return listen_at(self.hosts[self.index], port)


def try_peers(node: str, hosts: list[str], deadline: float) -> tuple[list[Record], int]:
    """Exchange blocks with other nodes, and return one record for each exchange, none if there is no other node; and
    how many strangers have called.

    Raises:
        OSError: the nodes did not find each other.
    """
    place = read_place(node, hosts)
    if len(place.hosts) < 2:
        return [], 0
    if not place.token:
        raise OSError(f"{TOKEN} is not set: the launcher of the step must pass it to all nodes")
    with Reception(place.listen(), place) as reception:
        met, strangers = meet(place, reception.port, deadline)
        records = [
            exchange(place, met, reception, number, peer)
            for number, peer in opponents(place.index, len(place.hosts))
            if time.monotonic() < deadline
        ]
        return records, strangers + reception.strangers


def read_place(node: str, hosts: list[str]) -> Place:
    """Return this node's place from Slurm's variables. A container has no scontrol: `hosts` are then given."""
    environment = os.environ
    return Place(int(environment.get("SLURM_NODEID", "0")), hosts or ask_hosts(node), environment.get(TOKEN, ""))


def ask_hosts(node: str) -> list[str]:
    """Return the nodes of the step in Slurm's order."""
    environment = os.environ
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or node
    done = subprocess.run(
        ["scontrol", "show", "hostnames", listed], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10
    )
    return done.stdout.split() or [node]


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which each meets each other once (the circle method); an odd one out rests."""
    slots: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(slots) - 1):
        half = len(slots) // 2
        pairs = zip(slots[:half], reversed(slots[half:]))
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        slots = [slots[0], slots[-1], *slots[1:-1]]
    return rounds


def opponents(index: int, count: int) -> list[tuple[int, int]]:
    """Return the rounds of one node, each with the node that it meets."""
    rounds = enumerate(tournament(count)[:MAX_ROUNDS])
    return [(number, a if b == index else b) for number, pairs in rounds for a, b in pairs if index in (a, b)]


# ------------------------------------------------------------------------------------------- finding each other


class Reception:
    """Lets other nodes in, in a thread of its own: no node waits for a stranger. A visit is known by the two numbers
    that come with its proof."""

    def __init__(self, listeners: list[socket.socket], place: Place) -> None:
        self._door = Door(listeners, place.token)
        self._visits: dict[tuple[int, int], socket.socket] = {}
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.port = self._door.port

    def __enter__(self) -> Reception:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        self._door.close()
        for link in self._visits.values():
            link.close()

    @property
    def strangers(self) -> int:
        return self._door.strangers

    def wait_for_all(self, number: int, deadline: float) -> dict[tuple[int, int], socket.socket]:
        """Return the visits once there are `number` of them, or those until the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._visits) >= number, max(0.0, deadline - time.monotonic()))
            return dict(self._visits)

    def wait_for(self, visit: tuple[int, int], deadline: float) -> socket.socket:
        """Return the connection of a visit, which then belongs to the caller.

        Raises:
            TimeoutError: it did not connect.
        """
        with self._changed:
            if self._changed.wait_for(lambda: visit in self._visits, max(0.0, deadline - time.monotonic())):
                return self._visits.pop(visit)
        raise TimeoutError("timed out")

    def _work(self) -> None:
        while not self._is_over:
            for guest in self._door.poll(POLL_S):
                self._take(guest)

    def _take(self, guest: Guest) -> None:
        try:
            first, second = map(int, guest.words.split())
        except ValueError:
            guest.link.close()
            return
        with self._changed:
            before = self._visits.pop((first, second), None)
            self._visits[first, second] = guest.link
            self._changed.notify_all()
        if before is not None:
            before.close()  # its node has given it up, and has come again


def meet(place: Place, port: int, deadline: float) -> tuple[dict[int, int], int]:
    """Return the port of every node that came, by index, and how many strangers have called. The first node collects
    and passes them on."""
    if place.index == 0:
        return collect(place, port, min(deadline, time.monotonic() + 15))
    words = b"%d %d" % (place.index, port)
    while time.monotonic() < deadline:
        for candidate in place.ports:
            address = (place.hosts[0], candidate)
            # Others may listen there: their messages are no answer.
            with contextlib.suppress(OSError), call(address, place.token, words, CALL_TIMEOUT_S) as link:
                pairs = [each.split(b":") for each in read_line(link, deadline, LONGEST_ANSWER).split()]
                return {int(index): int(its_port) for index, its_port in pairs}, 0
        time.sleep(0.1)
    raise OSError(f"the first node, {place.hosts[0]}, was not found")


def collect(place: Place, port: int, deadline: float) -> tuple[dict[int, int], int]:
    """Wait for all nodes or until the deadline, and send all of them the list of those that came."""
    with Reception(listen_on(place), place) as reception:
        visits = reception.wait_for_all(len(place.hosts) - 1, deadline)
        met = {0: port, **{index: its_port for index, its_port in visits}}
        answer = " ".join(f"{index}:{its_port}" for index, its_port in met.items()).encode() + b"\n"
        for link in visits.values():
            with contextlib.suppress(OSError):
                link.settimeout(CALL_TIMEOUT_S)
                link.sendall(answer)
        return met, reception.strangers


def listen_on(place: Place) -> list[socket.socket]:
    for port in place.ports:
        try:
            return place.listen(port)
        except OSError:
            continue
    raise OSError(f"all of the ports {place.ports} are in use")


# ------------------------------------------------------------------------------------------- one exchange


def exchange(place: Place, met: dict[int, int], reception: Reception, number: int, peer: int) -> Record:
    """Sum a block with another node, check the sum, and return how fast that was, or why it was not possible."""
    record: Record = {"round": number, "peer": place.hosts[peer], "status": "ok", "value": None, "why": ""}
    if peer not in met:
        return {**record, "status": "not_tried", "why": "it did not connect"}
    try:
        with connect(place, met, reception, number, peer) as connection:
            return {**record, "value": sum_block(connection, place.index, peer)}
    except (OSError, ValueError) as error:
        return {**record, "status": "failed", "why": str(error) or type(error).__name__}


def connect(place: Place, met: dict[int, int], reception: Reception, number: int, peer: int) -> socket.socket:
    """Return the connection of a pair for a round: the lower of the two accepts it."""
    deadline = time.monotonic() + PAIR_TIMEOUT_S
    if place.index < peer:
        return reception.wait_for((number, peer), deadline)
    while True:
        try:
            words = b"%d %d" % (number, place.index)
            return call((place.hosts[peer], met[peer]), place.token, words, max(0.1, deadline - time.monotonic()))
        except OSError as error:
            # Strangers may crowd the door of the other node: one that belongs there comes again.
            is_sent_away = isinstance(error, (ConnectionAbortedError, ConnectionResetError, BrokenPipeError))
            if not is_sent_away or time.monotonic() + CALL_AGAIN_S > deadline:
                raise
            time.sleep(CALL_AGAIN_S)


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
        raise OSError("received data differs from the data sent")
    return 2 * BLOCK_BYTES / 2**20 / seconds


def send_quietly(connection: socket.socket, block: bytes) -> None:
    with contextlib.suppress(OSError):  # the receiving side reports what is wrong
        connection.sendall(block)


def block_of(index: int) -> bytes:
    return bytes((value + index) % 256 for value in range(256)) * (BLOCK_BYTES // 256)
