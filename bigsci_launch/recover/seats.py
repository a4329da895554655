"""The controller's side of its connections to the runners: JSON lines over TCP, a beat each second, and a lease.

A seat that is silent for the length of the lease is lost, and so is one whose connection is closed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

from bigsci_launch.recover.generation import Seat
from bigsci_launch.recover.orders import JobEvent, RankEnded, RankSaid, SeatJoined, SeatLost, SeatReady, SeatUnfit

BEAT_S = 1.0
LEASE_S = 15.0
HELLO_TIMEOUT_S = 10.0
"""How long a connection may take to say which seat it is."""
MAX_LINE_BYTES = 1 << 20
KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", int(LEASE_S * 1000)))
"""So that the kernel finds out too that a host is gone, and keeps nothing for it."""


class Connection:
    """A connection to a runner. `seat` is None until it has said hello."""

    def __init__(self, link: socket.socket, now: float) -> None:
        self.link = link
        self.since = self.heard = now
        self.seat: int | None = None
        self.received = bytearray()
        self.unsent = bytearray()

    def lines(self) -> Iterator[bytes]:
        """Take the whole lines out of what was received."""
        *lines, rest = self.received.split(b"\n")
        self.received = bytearray(rest)
        for line in lines:
            yield bytes(line)


class Seats:
    """The server. It belongs to one thread, which calls `poll` again and again."""

    def __init__(self, token: str, *, is_local: bool) -> None:
        self._token = token
        self._listener = _listen(is_local)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: dict[socket.socket, Connection] = {}
        self._by_seat: dict[int, Connection] = {}
        self._next_beat = 0.0

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def numbers(self) -> list[int]:
        """The seats that are connected."""
        return sorted(self._by_seat)

    def wake_on(self, descriptor: int) -> None:
        """Have `poll` return when there is something to read from `descriptor`, which it then empties."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def poll(self, timeout_s: float) -> list[JobEvent]:
        """Wait for at most `timeout_s`, and return what has happened."""
        events: list[JobEvent] = []
        for key, mask in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, int):
                _drain(key.fileobj)
            elif (connection := self._connections.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                if mask & selectors.EVENT_WRITE:
                    self._flush(connection)
                if mask & selectors.EVENT_READ:
                    events += self._read(connection)
        # After reading: if this process itself was held up, what came in the meantime is now known.
        events += self._end_leases()
        self._beat()
        return events

    def tell(self, seat: int, message: dict[str, Any]) -> None:
        if (connection := self._by_seat.get(seat)) is not None:
            self._send(connection, json.dumps(message).encode() + b"\n")

    def drop(self, seat: int) -> None:
        """Close a connection. Its runner takes that for the loss of the controller, and ends everything."""
        if (connection := self._by_seat.get(seat)) is not None:
            self._close(connection)

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            link, _ = self._listener.accept()
            link.setblocking(False)
            _configure(link)
            self._connections[link] = Connection(link, time.monotonic())
            self._selector.register(link, selectors.EVENT_READ)

    def _read(self, connection: Connection) -> Iterator[JobEvent]:
        """Yield the events in what a connection has sent, and its loss if it is closed."""
        why = ""
        try:
            data = connection.link.recv(1 << 16)
            why = "" if data else "its connection was closed"
        except BlockingIOError:
            return
        except OSError as error:
            data, why = b"", f"its connection broke: {error.strerror or error}"
        connection.received += data
        connection.heard = time.monotonic()
        for line in connection.lines():
            try:
                event = self._event(connection, json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError):
                why = why or "it sent what is no message"
                break
            if event is not None:
                yield event
        if len(connection.received) > MAX_LINE_BYTES:
            why = why or "it sent a line without end"
        if why:
            yield from self._lose(connection, why)

    def _event(self, connection: Connection, message: dict[str, Any]) -> JobEvent | None:
        if message["say"] == "hello":
            return self._admit(connection, message)
        if connection.seat is None:
            raise ValueError("the first message is hello")
        return None if message["say"] == "beat" else event_of(connection.seat, message)

    def _admit(self, connection: Connection, message: dict[str, Any]) -> JobEvent | None:
        is_known = hmac.compare_digest(str(message["token"]).encode(), self._token.encode())
        number = int(message["seat"])
        if not is_known or number in self._by_seat or connection.seat is not None:
            raise ValueError("not a seat of this job")
        connection.seat, self._by_seat[number] = number, connection
        return SeatJoined(
            Seat(
                number,
                str(message["node"]),
                str(message["host"]),
                int(message["local_rank"]),
                int(message["runner_pid"]),
            )
        )

    def _end_leases(self) -> list[JobEvent]:
        events: list[JobEvent] = []
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.seat is None and now - connection.since > HELLO_TIMEOUT_S:
                self._close(connection)
            elif now - connection.heard > LEASE_S:
                events += self._lose(connection, f"nothing was heard from it for {LEASE_S:g} s", is_silent=True)
        return events

    def _lose(self, connection: Connection, why: str, *, is_silent: bool = False) -> list[JobEvent]:
        self._close(connection)
        return [SeatLost(connection.seat, why, is_silent)] if connection.seat is not None else []

    def _close(self, connection: Connection) -> None:
        if self._connections.pop(connection.link, None) is None:
            return
        self._selector.unregister(connection.link)
        connection.link.close()
        if connection.seat is not None and self._by_seat.get(connection.seat) is connection:
            del self._by_seat[connection.seat]

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_S
        for connection in list(self._by_seat.values()):
            self._send(connection, b'{"do": "beat"}\n')

    def _send(self, connection: Connection, data: bytes) -> None:
        connection.unsent += data
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        """Send what the connection takes now. An error shows up when it is read."""
        with contextlib.suppress(OSError):
            sent = connection.link.send(connection.unsent)
            del connection.unsent[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if connection.link in self._connections:
            self._selector.modify(connection.link, wanted)


def event_of(seat: int, message: dict[str, Any]) -> JobEvent:
    """Return what a message of a seat says.

    Raises:
        ValueError, LookupError, TypeError: it is no message of the protocol.
    """
    fields = dict(message)
    said = fields.pop("say")
    if said == "ready":
        return SeatReady(seat, fields["generation"], int(fields["port"]))
    if said == "unfit":
        return SeatUnfit(seat, str(fields["words"]))
    if said == "ended":
        return RankEnded(
            seat,
            fields.get("generation"),
            fields.get("rank"),
            fields.get("code"),
            fields.get("signal"),
            fields.get("time"),
            bool(fields.get("was_told")),
            bool(fields.get("is_final")),
            fields.get("words"),
        )
    if said == "rank":
        word, generation = str(fields.pop("word")), fields.pop("generation", None)
        return RankSaid(seat, generation, word, fields)
    raise ValueError(f"{said!r} is not a message of a seat")


def _listen(is_local: bool) -> socket.socket:
    if is_local:
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0), backlog=4096)
    listener.setblocking(False)
    return listener


def _configure(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while len(os.read(descriptor, 4096)) == 4096:
            pass
