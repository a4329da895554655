"""Listens for unknown callers, and lets in those that prove that they have the token.

    door                caller
    bsl CHALLENGE  ->
                   <-   PROOF NONCE WORDS
    PROOF          ->

A proof is an HMAC of everything that was sent before it, and of WORDS. So the token never travels, no answer is good a
second time, and what a stranger sends is never more than some bytes: they are compared, and nothing is parsed. What is
sent after the proofs is neither encrypted nor signed.

Standard library only, for any Python from 3.8 on: the same file is in `diagnostics/`, where the programs of a job
import it.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import selectors
import socket
import time

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

HELLO_S = 2.0
"""How long a caller may take for its line."""
MOST_CALLERS = 256
"""How many may be at the door at once. When more come, the oldest has to leave; one that belongs here tries again."""
ACCEPTED_AT_ONCE = 64
BACKLOG = 4096
LONGEST_LINE = 256
"""Bytes of a line of the door, and of a caller's by default."""
LOOPBACK = ("127.", "::1")
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
GREETING = b"bsl "


class Guest:
    """A caller that has proved that it has the token: its connection, and the words that it sent with that."""

    __slots__ = ("link", "words")

    def __init__(self, link: socket.socket, words: bytes) -> None:
        self.link, self.words = link, words


class Caller:
    """A caller at the door: its challenge, and how far its answer has come."""

    __slots__ = ("challenge", "host", "line", "link", "since")

    def __init__(self, link: socket.socket, host: str) -> None:
        self.link, self.host, self.since = link, host, time.monotonic()
        self.challenge = os.urandom(16).hex().encode()
        self.line = b""


class Door:
    """The door of a program that listens. It belongs to one thread, which calls `poll` again and again.

    `strangers` counts the callers that were sent away, and `newest_stranger` is the address of the last one.
    """

    def __init__(self, listeners: Sequence[socket.socket], token: str, longest: int = LONGEST_LINE) -> None:
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._token, self._longest = token, longest
        self._selector = selectors.EpollSelector()
        self._callers: dict[int, Caller] = {}
        self._spare = _open_spare()
        self.strangers, self.newest_stranger = 0, ""
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        return int(next(iter(self._listeners.values())).getsockname()[1])

    def fileno(self) -> int:
        """A descriptor that can be read when a caller is at the door, for the selector of the caller of `poll`."""
        return self._selector.fileno()

    def poll(self, timeout_s: float = 0.0) -> list[Guest]:
        """Wait for at most `timeout_s`, and return who was let in. Nothing that a caller does raises anything."""
        guests: list[Guest] = []
        ready = [key.fd for key, _ in self._selector.select(timeout_s)]
        for number in ready:
            if number in self._callers:
                guests += self._hear(self._callers[number])
        for number in ready:
            if number in self._listeners:
                self._accept(self._listeners[number])
        while self._callers and time.monotonic() - self._oldest.since > HELLO_S:
            self._turn_away(self._oldest)
        return guests

    def close(self) -> None:
        for link in (*self._listeners.values(), *(caller.link for caller in self._callers.values())):
            link.close()
        self._callers.clear()
        self._selector.close()
        self._close_spare()

    @property
    def _oldest(self) -> Caller:
        return next(iter(self._callers.values()))

    def _accept(self, listener: socket.socket) -> None:
        for number in range(ACCEPTED_AT_ONCE):
            try:
                link, address = listener.accept()
            except OSError as error:
                # Without a descriptor, the kernel reports that even without a caller; for the first, there is one.
                if number == 0 and error.errno in NO_ROOM:
                    self._make_room(listener)
                return
            self._ask(Caller(link, str(address[0])))

    def _ask(self, caller: Caller) -> None:
        if len(self._callers) >= MOST_CALLERS:
            self._turn_away(self._oldest)
        self._callers[caller.link.fileno()] = caller
        try:
            caller.link.setblocking(False)
            self._selector.register(caller.link, selectors.EVENT_READ)
            caller.link.send(GREETING + caller.challenge + b"\n")
        except OSError:
            self._turn_away(caller)

    def _make_room(self, listener: socket.socket) -> None:
        """No descriptor is left: the oldest caller gives up its own, or the newest is sent away with the spare one."""
        if self._callers:
            self._turn_away(self._oldest)
            return
        self._close_spare()
        with contextlib.suppress(OSError):
            link, address = listener.accept()
            self._count(str(address[0]))
            link.close()
        self._spare = _open_spare()

    def _hear(self, caller: Caller) -> list[Guest]:
        try:
            piece = take_piece(caller.link, self._longest - len(caller.line))
            caller.line += piece
            if caller.line.endswith(b"\n"):
                return [self._let_in(caller)]
            if piece and len(caller.line) < self._longest:
                return []  # the rest may come
        except BlockingIOError:
            return []
        except Exception:  # whatever a caller sends, all that it can lose is its connection
            pass
        self._turn_away(caller)
        return []

    def _let_in(self, caller: Caller) -> Guest:
        proof, nonce, words = caller.line[:-1].split(b" ", 2)
        if not hmac.compare_digest(proof, prove(self._token, b"caller", caller.challenge, nonce, words)):
            raise ValueError("it does not have the token")
        caller.link.send(prove(self._token, b"door", proof) + b"\n")
        self._selector.unregister(caller.link)
        del self._callers[caller.link.fileno()]
        return Guest(caller.link, words)

    def _turn_away(self, caller: Caller) -> None:
        self._count(caller.host)
        self._callers.pop(caller.link.fileno(), None)
        with contextlib.suppress(KeyError, OSError):
            self._selector.unregister(caller.link)
        caller.link.close()

    def _count(self, host: str) -> None:
        self.strangers, self.newest_stranger = self.strangers + 1, host

    def _close_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


def _open_spare() -> int | None:
    with contextlib.suppress(OSError):
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    time.sleep(0.05)  # another thread has taken it; this one must not spin
    return None


def call(address: tuple[str, int], token: str, words: bytes, timeout_s: float) -> socket.socket:
    """Connect to a door, and return the connection once each side has proved that it has the token.

    Raises:
        OSError: no process listens there, it is not the door that is looked for, or it does not let us in.
    """
    deadline = time.monotonic() + timeout_s
    link = socket.create_connection(address, timeout=timeout_s)
    try:
        greeting = read_line(link, deadline)
        nonce = os.urandom(16).hex().encode()
        proof = prove(token, b"caller", greeting[len(GREETING) :], nonce, words)
        link.sendall(b"%s %s %s\n" % (proof, nonce, words))
        if not hmac.compare_digest(read_line(link, deadline), prove(token, b"door", proof)):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the process that listens there does not have the token")
    except BaseException:
        link.close()
        raise
    return link


def prove(token: str, *parts: bytes) -> bytes:
    """Return what can only be computed from these parts with the token. Only the last one may have line breaks."""
    return hmac.new(token.encode(), b"\n".join(parts), "sha256").hexdigest().encode()


def read_line(link: socket.socket, deadline: float, longest: int = LONGEST_LINE) -> bytes:
    """Return the next line, without its end. Nothing after it is read.

    Raises:
        OSError: the connection was closed, the time is over, or the line is too long.
    """
    line = b""
    while not line.endswith(b"\n"):
        link.settimeout(max(0.001, deadline - time.monotonic()))
        piece = take_piece(link, longest - len(line))
        line += piece
        if not piece or (len(line) >= longest and not line.endswith(b"\n")):
            raise ConnectionAbortedError(errno.ECONNABORTED, "the line is too long" if piece else "it was closed")
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
    return line[:-1]


def take_piece(link: socket.socket, most: int) -> bytes:
    """Receive what there is, up to the end of the line and no further; nothing if the connection was closed."""
    seen = link.recv(most, socket.MSG_PEEK)
    return link.recv(seen.find(b"\n") + 1 or len(seen)) if seen else b""


# ---------------------------------------------------------------------------------------------------- where to listen


def listen_at(host: str, port: int = 0, *, only_here: bool = False) -> list[socket.socket]:
    """Listen on the addresses that others know by the name `host`, with one port; `only_here`: all are on this machine.

    A name that is known on this machine only as a loopback address, or not at all, does not show the address that
    others use: then, and where that address cannot be bound, this listens on all addresses.

    Raises:
        OSError: the port is in use.
    """
    listeners: list[socket.socket] = []
    for family, place in _addresses(host, only_here):
        try:
            listener = socket.create_server((place[0], port, *place[2:]), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not listeners:
                raise
            continue
        listeners.append(listener)
        port = int(listener.getsockname()[1])
    return listeners or [_listen_everywhere(port)]


def is_everywhere(listeners: Sequence[socket.socket]) -> bool:
    """Whether these listen on all addresses of the machine."""
    return any(listener.getsockname()[0] in ("::", "0.0.0.0") for listener in listeners)


def _addresses(host: str, only_here: bool) -> list[tuple[int, Any]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    places = list(dict.fromkeys((int(family), place) for family, _, _, _, place in found))
    if only_here or host in [place[0] for _, place in places]:
        return places
    return [(family, place) for family, place in places if not str(place[0]).startswith(LOOPBACK)]


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=BACKLOG)
