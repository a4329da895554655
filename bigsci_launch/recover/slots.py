"""The controller's side of its connections to the runners: JSON lines over TCP, a heartbeat each second, and a lease.

A runner comes in by the door, where it proves that it has the token of the job. A slot that is silent for the length of
the lease while others speak is lost, and so is one whose connection is closed, or that sends what is no message. When
all fall silent together, the cause is not in any of them: a job that was suspended, a network that is down.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bigsci_launch.awake_clock import AwakeClock
from bigsci_launch.door import Door, Guest
from bigsci_launch.nodes.memory import NODE_NAME
from bigsci_launch.printable import one_line
from bigsci_launch.recover.generation import Slot
from bigsci_launch.recover.orders import JobEvent, RankEnded, RankSaid, SlotJoined, SlotLost, SlotReady, SlotUnfit
from bigsci_launch.safe_files import parse_json

HEARTBEAT_S = 1.0
LEASE_S = 15.0
SPEAKS_S = 5.0
"""A slot that was heard from so lately shows that the silence of another one is its own."""
ALL_SILENT_S = 600.0
"""When all slots are silent for this long, none comes back."""
HELLO_BYTES = 4096
"""The longest line with which a runner says who it is, its proof included."""
MAX_LINE_BYTES = 1 << 20
MAX_PORT = 65535
EARLIEST, DAY_S = 946_684_800.0, 86_400.0
"""Seconds since the epoch, of the year 2000: a clock that says less, or more than tomorrow, was never set."""
KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 9), ("TCP_USER_TIMEOUT", 120_000))
"""So that the kernel finds out too that a host is gone, long after the lease, and keeps nothing for it."""


class Connection:
    """A connection to the runner of a slot."""

    def __init__(self, link: socket.socket, slot: int, now: float) -> None:
        self.link, self.slot = link, slot
        self.heard = now
        self.received = bytearray()
        self.unsent = bytearray()

    def lines(self) -> Iterator[bytes]:
        """Take the whole lines out of what was received."""
        *lines, rest = self.received.split(b"\n")
        self.received = bytearray(rest)
        for line in lines:
            yield bytes(line)


class Slots:
    """The server. It belongs to one thread, which calls `poll` again and again."""

    def __init__(self, token: str, listeners: Sequence[socket.socket], num_slots: int, clock: AwakeClock) -> None:
        self._clock = clock
        self._door = Door(listeners, token, HELLO_BYTES)
        self._num_slots = num_slots
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._connections: dict[socket.socket, Connection] = {}
        self._by_slot: dict[int, Connection] = {}
        self._next_heartbeat = self._spoke = clock.read()

    @property
    def port(self) -> int:
        return self._door.port

    @property
    def strangers(self) -> tuple[int, str]:
        """How many callers did not have the token, and the address of the newest."""
        return self._door.strangers, self._door.newest_stranger

    @property
    def numbers(self) -> list[int]:
        """The slots that are connected."""
        return sorted(self._by_slot)

    def wake_on(self, descriptor: int) -> None:
        """Have `poll` return when there is something to read from `descriptor`, which it then empties."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def poll(self, timeout_s: float) -> list[JobEvent]:
        """Wait for at most `timeout_s`, and return what has happened."""
        events: list[JobEvent] = []
        for key, mask in self._selector.select(timeout_s):
            if isinstance(key.fileobj, int):
                _drain(key.fileobj)
            elif (connection := self._connections.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                if mask & selectors.EVENT_WRITE:
                    self._flush(connection)
                if mask & selectors.EVENT_READ:
                    events += self._read(connection)
        for guest in self._door.poll():
            events += self._admit(guest)
        # After reading: what came while this process itself was held up is now known.
        events += self._end_leases()
        self._heartbeat()
        return events

    def tell(self, slot: int, message: dict[str, Any]) -> None:
        if (connection := self._by_slot.get(slot)) is not None:
            self._send(connection, json.dumps(message).encode() + b"\n")

    def drop(self, slot: int) -> None:
        """Close a connection. Its runner takes that for the loss of the controller, and ends everything."""
        if (connection := self._by_slot.get(slot)) is not None:
            self._close(connection)

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection)
        self._door.close()
        self._selector.close()

    def _admit(self, guest: Guest) -> list[JobEvent]:
        """Give a runner its slot; one that asks for none of this job, or for one that is taken, is sent away."""
        try:
            slot = slot_of(parse_json(guest.words), self._num_slots)
            if slot.number in self._by_slot:
                raise ValueError(f"slot {slot.number} is taken")
            _configure(guest.link)
            self._selector.register(guest.link, selectors.EVENT_READ)
        except Exception:  # nothing that a connection brings may end the job
            guest.link.close()
            return []
        connection = Connection(guest.link, slot.number, self._end_common_silence())
        self._connections[guest.link] = self._by_slot[slot.number] = connection
        return [SlotJoined(slot)]

    def _read(self, connection: Connection) -> list[JobEvent]:
        """Return the events in what a connection has sent, and its loss if it is closed."""
        events: list[JobEvent] = []
        why = ""
        try:
            data = connection.link.recv(1 << 16)
            why = "" if data else "the connection to its runner was closed"
        except BlockingIOError:
            return []
        except OSError as error:
            data, why = b"", f"the connection to its runner broke: {error.strerror or error}"
        connection.received += data
        connection.heard = self._end_common_silence()
        try:
            for line in connection.lines():
                events += event_of(connection.slot, parse_json(line, MAX_LINE_BYTES))
        except Exception:  # nothing that a connection brings may end the job
            why = why or "it sent an invalid message"
        if len(connection.received) > MAX_LINE_BYTES:
            why = why or "it sent an endless line"
        return [*events, *(self._lose(connection, why) if why else ())]

    def _end_common_silence(self) -> float:
        """Note that a slot speaks, and return when. If none did for a while, that was no silence of the others."""
        before, self._spoke = self._spoke, self._clock.read()
        if self._spoke - before > SPEAKS_S:
            for connection in self._connections.values():
                connection.heard += self._spoke - before
        return self._spoke

    def _end_leases(self) -> list[JobEvent]:
        connections, now = list(self._connections.values()), self._clock.read()
        if now - self._spoke > ALL_SILENT_S:
            why = f"no message from any slot for {ALL_SILENT_S:g} s"
            return [event for connection in connections for event in self._lose(connection, why)]
        if now - self._spoke > SPEAKS_S:
            return []
        silent = [connection for connection in connections if now - connection.heard > LEASE_S]
        why = f"no message from it for {LEASE_S:g} s"
        return [event for connection in silent for event in self._lose(connection, why, is_silent=True)]

    def _lose(self, connection: Connection, why: str, *, is_silent: bool = False) -> list[JobEvent]:
        self._close(connection)
        return [SlotLost(connection.slot, why, is_silent)]

    def _close(self, connection: Connection) -> None:
        if self._connections.pop(connection.link, None) is None:
            return
        self._selector.unregister(connection.link)
        connection.link.close()
        if self._by_slot.get(connection.slot) is connection:
            del self._by_slot[connection.slot]

    def _heartbeat(self) -> None:
        now = self._clock.read()
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + HEARTBEAT_S
        for connection in list(self._by_slot.values()):
            self._send(connection, b'{"do": "heartbeat"}\n')

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


def slot_of(hello: dict[str, Any], num_slots: int) -> Slot:
    """Return the slot that a runner asks for.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: it is no slot of this job.
    """
    return Slot(
        _whole(hello["slot"], num_slots - 1),
        _name(hello["node"]),
        _name(hello["host"]),
        _whole(hello["local_rank"], num_slots - 1),
        _whole(hello["runner_pid"]),
        {_text(name): _text(value) for name, value in hello.get("place", {}).items()},
    )


def event_of(slot: int, message: dict[str, Any]) -> list[JobEvent]:
    """Return what a message of a slot says; nothing for a heartbeat.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: it is no message of the protocol.
    """
    fields = dict(message)
    said = fields.pop("say")
    generation = None if fields.get("generation") is None else _whole(fields["generation"])
    if said == "heartbeat":
        return []
    if said == "ready":
        return [SlotReady(slot, generation, _whole(fields["port"], MAX_PORT))]
    if said == "unfit":
        return [SlotUnfit(slot, _words(fields["words"]))]
    if said == "ended":
        return [_ended(slot, generation, fields)]
    if said == "rank":
        fields.pop("generation", None)
        return [RankSaid(slot, generation, _text(fields.pop("word")), fields)]
    raise ValueError(f"{said!r} is not a message of a slot")


def _ended(slot: int, generation: int | None, fields: dict[str, Any]) -> RankEnded:
    rank, code, moment = (fields.get(name) for name in ("rank", "code", "time"))
    by_signal, words = fields.get("signal"), fields.get("words")
    return RankEnded(
        slot,
        generation,
        None if rank is None else _whole(rank),
        None if code is None else _whole(code),
        None if by_signal is None else _text(by_signal),
        None if moment is None else _moment(moment),
        bool(fields.get("was_requested")),
        bool(fields.get("is_final")),
        None if words is None else _words(words),
    )


def _whole(value: Any, most: int = (1 << 31) - 1) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is not a whole number from 0 to {most}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.40} is not text")
    return value


def _name(value: Any) -> str:
    if not NODE_NAME.fullmatch(_text(value)):
        raise ValueError(f"{value!r:.40} is not a node name")
    return str(value)


def _words(value: Any) -> str:
    """Return text to quote in lines that are read and parsed: one line."""
    return one_line(_text(value))


def _moment(value: Any) -> float:
    """Return a time in seconds since the epoch, from the year 2000 to tomorrow."""
    if type(value) not in (int, float) or not EARLIEST <= value <= time.time() + DAY_S:
        raise ValueError(f"{value!r:.40} is not a time of this job")
    return float(value)


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
