"""The connection of a slot to the controller of a job with `survive`, for rank_slot.py. Standard library only.

Both sides first prove that they have the token of the job: see door.py. Then it is one JSON object a line, both ways,
over TCP. Both send a `heartbeat` each second. A runner that hears nothing for `LEASE_S` while it runs itself takes the
controller for lost; the controller gives up a runner earlier, so that it is the one who decides. Reading and beating
have a thread of their own: neither a file system that does not answer nor a slow start of a program may look like a
lost node.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import threading
import time

from awake_clock import AwakeClock
from door import call
from free_port import EPHEMERAL, candidates, port_range, why_taken
from safe_files import parse_json

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from typing import Any

HEARTBEAT_S = 1.0
LEASE_S = 60.0
CUT_MS = 120_000
"""How long the kernel may send the same again before it takes the network for cut."""
CONNECT_S = 30.0
"""How long to try to connect. The runners of a large job come all at once."""
LONGEST_LINE = 1 << 20


class Link:
    """A connection to the controller at `host:port`, which is told `hello`. What it says comes as dicts into `events`;
    then, once the connection is over, None."""

    def __init__(self, address: str, token: str, hello: dict[str, Any], events: queue.SimpleQueue[Any]) -> None:
        host, _, port = address.rpartition(":")
        self._events = events
        self._lock = threading.Lock()
        self._socket = connect((host.strip("[]"), int(port)), token, encoded(hello))
        self._socket.settimeout(LEASE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError, AttributeError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CUT_MS)
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, what: str, /, **fields: Any) -> None:
        """Send one message. If that fails, the thread that listens will find the connection over."""
        data = encoded({"say": what, **fields}) + b"\n"
        with self._lock:
            try:
                self._socket.sendall(data)
            except OSError:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        with contextlib.suppress(Exception):  # however it ends, the slot must hear of it
            self._read()
        self._events.put(None)

    def _read(self) -> None:
        rest, clock = b"", AwakeClock()
        now = heard = beaten = clock.read()
        while now - heard < LEASE_S and len(rest) < LONGEST_LINE:
            if select.select([self._socket], [], [], HEARTBEAT_S / 2)[0]:
                chunk = self._socket.recv(65536)
                if not chunk:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                heard = now
                for message in map(parse_json, lines):
                    if message.get("do") != "heartbeat":
                        self._events.put(message)
            now = clock.read()
            if now - beaten >= HEARTBEAT_S:
                beaten = now
                self.say("heartbeat")


def connect(address: tuple[str, int], token: str, hello: bytes) -> socket.socket:
    """Return a connection to the controller, which may be too busy for the first attempts, or have a crowd at its door.

    Raises:
        OSError: it cannot be reached, or does not let us in.
    """
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return call(address, token, hello, CONNECT_S / 3)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2 + 0.1 * (os.getpid() % 10))


def encoded(message: dict[str, Any]) -> bytes:
    """Return a message as a line without its end. Bytes of file names that are no text become question marks."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")


class OfferedPort:
    """A TCP port that is free on this host, for the store of rank 0.

    Rank 0 must be able to bind it, so it cannot be held. As the local launcher does, this holds an abstract socket with
    the port in its name: other slots and launchers of this machine choose another one.
    """

    def __init__(self) -> None:
        self._name: socket.socket | None = None

    def find(self) -> int:
        """Return a free port, another one each time: connections of the generation before may still use the last.

        Any user may hold such names. If none is left, a free port does without one; 0 if no port is free.
        """
        nameless = 0
        first, after = port_range(EPHEMERAL)
        wanted = first + (os.getpid() * 7 + time.monotonic_ns() // 1000) % (after - first)
        for port in candidates(wanted, (first, after)):
            name = socket.socket(socket.AF_UNIX)
            try:
                name.bind(f"\0bsl-port-{port}")
            except OSError:
                name.close()
                nameless = nameless or (port if why_taken(port) is None else 0)
                continue
            if why_taken(port) is None:
                if self._name is not None:
                    self._name.close()
                self._name = name
                return port
            name.close()
        return nameless
