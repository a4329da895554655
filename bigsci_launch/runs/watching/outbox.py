"""Messages for people about a run, and each try to deliver them: `watch/outbox.jsonl`.

Compute nodes often have no way out, so a message waits here until a watcher on some machine can deliver it. Nothing
here holds an address: ways are known by name, `command` or `webhook`. Only messages of the run's owner count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass

from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.records import append_own, read_own
from bigsci_launch.runs.watching.typed import typed

KEPT_S = 86400.0
"""A message that is older than this is no longer delivered."""
SHOWN_S = 3 * KEPT_S
"""How long people are shown that it was not."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 1800.0
MOST_TRIES = 12
"""How often one machine tries to deliver a message."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A message for people. `key` is the same for the same message. `what` is a word for programs: the kind of a
    finding, an act, or `test`. `next` is the command that shows more, `who` the watcher or person who sends it."""

    key: str
    what: str
    sentence: str
    run: str
    who: str
    time: float
    attempt: str | None = None
    step: int | None = None
    details: tuple[str, ...] = ()
    next: str = ""
    bundle: str | None = None


@dataclass(frozen=True, slots=True)
class Try:
    """One try to deliver a message by one way, and its result. `number` counts from 1."""

    key: str
    way: str
    number: int
    host: str
    time: float
    ok: bool
    words: str


@dataclass(frozen=True, slots=True)
class _Ways:
    ways: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pending:
    """A message that has not been delivered by one of its ways, and every try so far."""

    notice: Notice
    way: str
    tries: tuple[Try, ...] = ()

    def is_due(self, host: str, now: float) -> bool:
        """Whether this machine may try now. Each has pauses of its own, because one may have no network."""
        here = [each.time for each in self.tries if each.host == host]
        if len(here) >= MOST_TRIES or now - self.notice.time > KEPT_S:
            return False
        return not here or now - here[-1] >= min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (len(here) - 1))

    @property
    def next_number(self) -> int:
        return self.tries[-1].number + 1 if self.tries else 1

    @property
    def claim_key(self) -> str:
        """What a watcher claims before it makes the next try."""
        digest = hashlib.sha256(self.notice.key.encode()).hexdigest()[:16]
        return f"tell-{digest}-{self.way}-{self.next_number}"


def queue_notice(run: RunDir, notice: Notice, ways: Iterable[str]) -> None:
    """Put a message into the outbox. Raises OSError if it cannot be written."""
    append_own(run, run.outbox, {"event": "queued", **asdict(notice), "ways": list(ways)})


def is_queued(run: RunDir, key: str) -> bool:
    """Return whether the message `key` has been put into the outbox before."""
    lines = read_own(run, run.outbox).records
    return any(line.get("event") == "queued" and line.get("key") == key for line in lines)


def record_try(run: RunDir, tried: Try) -> None:
    """Record the result of a try. Raises OSError if it cannot be written."""
    append_own(run, run.outbox, {"event": "tried", **asdict(tried)})


def read_pending(run: RunDir) -> list[Pending]:
    """Return every message that has not been delivered by one of its ways, oldest first. One that was queued twice
    counts once."""
    notices: dict[tuple[str, str], Notice] = {}
    tries: dict[tuple[str, str], dict[int, Try]] = {}
    for line in read_own(run, run.outbox).records:
        with suppress(ValueError):
            if line.get("event") == "queued":
                notice = typed(Notice, line)
                for way in typed(_Ways, line).ways:
                    notices.setdefault((notice.key, way), notice)
            elif line.get("event") == "tried":
                tried = typed(Try, line)
                tries.setdefault((tried.key, tried.way), {})[tried.number] = tried
    pending = []
    for (key, way), notice in notices.items():
        made = tries.get((key, way), {})
        if not any(tried.ok for tried in made.values()):
            pending.append(Pending(notice, way, tuple(made[number] for number in sorted(made))))
    return pending


def undelivered(run: RunDir, now: float) -> list[str]:
    """Return a sentence for each way that has failed to deliver messages of the last days."""
    failed: dict[str, list[Pending]] = {}
    for each in read_pending(run):
        if each.tries and now - each.notice.time < SHOWN_S:
            failed.setdefault(each.way, []).append(each)
    return [_failed(way, held) for way, held in failed.items()]


def _failed(way: str, held: list[Pending]) -> str:
    newest = held[-1]
    number = "1 message" if len(held) == 1 else f"{len(held)} messages"
    tries = "1 try" if len(newest.tries) == 1 else f"{len(newest.tries)} tries"
    last = newest.tries[-1]
    return f"{number} not delivered by {way}, after {tries}, last on {last.host}: {last.words}"
