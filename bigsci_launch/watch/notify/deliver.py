"""Tells people: a message goes into the run's outbox, and a watcher that can delivers it once by each way.

Nothing here makes a watcher wait: sending happens in threads, and what they have not managed in time they note in the
outbox when they have. A watcher that dies while it sends leaves a try without a result; another one tries again. So a
message may arrive twice, but is not lost.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.ledger import claim, claimed_at
from bigsci_launch.runs.watching.outbox import Notice, Pending, Try, is_queued, queue_notice, read_pending, record_try
from bigsci_launch.watch.notify.ways import COMMAND_LIMIT_S, NotificationFailed, Way, read_ways

WAIT_S = 3.0
"""How long a watcher waits for what it sends."""
DIED_S = 600.0
"""A try that has no result for this long was made by a watcher that died."""
MOST_AT_ONCE = 8

_without_outbox: set[tuple[str, str, str]] = set()
"""Messages of this process about runs into which it cannot write."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came of one try to send a message. `ok` is None while it is still being sent."""

    way: str
    ok: bool | None
    words: str
    seconds: float


def tell(run: RunDir, notice: Notice, *, wait_s: float = WAIT_S) -> list[Delivery]:
    """Send a message by every way of the run's newest attempt; one with the same key is sent only once.

    What cannot be delivered now waits in the outbox, for `deliver`. If the outbox cannot be written, such as on a full
    disk, the message is sent all the same, once by each process.
    """
    ways = ways_of_run(run)
    if not ways:
        return []
    try:
        if not is_queued(run, notice.key):
            queue_notice(run, notice, [way.name for way in ways])
    except OSError:
        return _send_without_outbox(run, notice, ways, wait_s)
    return deliver(run, wait_s=wait_s)


def deliver(run: RunDir, *, wait_s: float = WAIT_S) -> list[Delivery]:
    """Try to send what waits in the outbox and is due on this machine. Every watcher does this at each look."""
    if not run.outbox.exists():
        return []
    host, now = socket.gethostname(), time.time()
    due = [each for each in read_pending(run) if each.is_due(host, now)]
    if not due:
        return []
    ways = {way.name: way for way in ways_of_run(run)}
    begun = []
    for each in due[:MOST_AT_ONCE]:
        if each.way in ways and _takes_try(run, each, host):
            begun.append(_Sending(ways[each.way], each.notice, _note_in_outbox(run, each, host)))
    return _wait(begun, wait_s)


def send_now(notice: Notice, ways: Iterable[Way]) -> list[Delivery]:
    """Send a message by all ways, not by way of the outbox, and wait for all of them."""
    return _wait([_Sending(way, notice, lambda ok, words: None) for way in ways], COMMAND_LIMIT_S + 5)


def ways_of_run(run: RunDir) -> tuple[Way, ...]:
    """Return the ways of the run's newest attempt; none if it has no attempt."""
    try:
        attempt = run.latest_attempt()
    except RunDirError:
        return ()
    return read_ways(attempt) if attempt is not None else ()


class _Sending:
    """A message on its way, in a thread that dies with the process."""

    def __init__(self, way: Way, notice: Notice, note: Callable[[bool, str], None]) -> None:
        self.way, self.notice, self._note = way, notice, note
        self._began = time.monotonic()
        self._result: Delivery | None = None
        self._thread = threading.Thread(target=self._run, name=f"bsl-tell-{way.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            ok, words = True, self.way.send(self.notice)
        except NotificationFailed as error:
            ok, words = False, str(error)
        except Exception as error:  # its traceback, on the watcher's stderr, could show the address
            ok, words = False, f"{type(error).__name__} while sending"
        self._result = Delivery(self.way.name, ok, words, time.monotonic() - self._began)
        self._note(ok, words)

    def wait(self, seconds: float) -> Delivery:
        """Return the result, or that it is still being sent."""
        self._thread.join(max(0.0, seconds))
        return self._result or Delivery(self.way.name, None, "still being sent", time.monotonic() - self._began)


def _wait(sendings: Iterable[_Sending], wait_s: float) -> list[Delivery]:
    deadline = time.monotonic() + wait_s
    return [sending.wait(deadline - time.monotonic()) for sending in sendings]


def _note_in_outbox(run: RunDir, pending: Pending, host: str) -> Callable[[bool, str], None]:
    """Return what notes the result of the next try to deliver a message."""

    def note(ok: bool, words: str) -> None:
        tried = Try(pending.notice.key, pending.way, pending.next_number, host, time.time(), ok, words)
        with suppress(OSError):  # another watcher will find a try without a result
            record_try(run, tried)

    return note


def _takes_try(run: RunDir, pending: Pending, host: str) -> bool:
    """Whether this watcher makes the next try. If another took it and died, that is noted, and the one after it is
    free."""
    try:
        if claim(run, pending.claim_key, host):
            return True
        if time.time() - claimed_at(run, pending.claim_key) > DIED_S:
            _note_in_outbox(run, pending, host)(False, "the watcher died while sending it")
    except OSError:
        pass
    return False


def _send_without_outbox(run: RunDir, notice: Notice, ways: Sequence[Way], wait_s: float) -> list[Delivery]:
    """Send a message about a run whose directory cannot be written, once by each way if that succeeds."""

    def send(way: Way) -> _Sending:
        known = (str(run.path), notice.key, way.name)
        _without_outbox.add(known)
        return _Sending(way, notice, lambda ok, _: None if ok else _without_outbox.discard(known))

    new = [way for way in ways if (str(run.path), notice.key, way.name) not in _without_outbox]
    return _wait([send(way) for way in new], wait_s)
