"""The sign of life of a watcher: who watches a run, when it last looked, and what it found."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from bigsci_launch.errors import RunDirError
from bigsci_launch.procfs import start_ticks
from bigsci_launch.runs.layout import RunDir, read_json, write_json

AGENT = "agent"
"""What the names of watchers begin with that job scripts start: `agent-0001` watches attempt 0001."""
MISSED = 6
"""A watcher that has left out this many looks is dead, or does not get to run."""
LEAST_SILENCE_S = 120.0


class Health(Enum):
    """What a watcher says of a run. Not to see is no health: `blind` is said where nothing is known."""

    HEALTHY = "healthy"
    FINDING = "finding"
    BLIND = "blind"


@dataclass(frozen=True, slots=True)
class Beat:
    """`every_s` is the time between two looks; `time` is seconds since the epoch by the clock of `host`. `blind` says
    what it could not see. `may_act`: whether it was allowed to act. `ended`: it has left by itself."""

    name: str
    host: str
    pid: int
    start_ticks: int | None
    time: float
    every_s: float
    health: Health
    sentence: str
    attempt: str | None
    may_act: bool
    blind: tuple[str, ...] = ()
    ended: bool = False

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def is_dead(self, now: float) -> bool | None:
        """Whether the watcher is gone without having said so; None if it is on another host and only just late."""
        if self.ended:
            return False
        if self.is_here:
            return start_ticks(self.pid) != self.start_ticks
        age = now - self.time
        return age > max(LEAST_SILENCE_S, MISSED * self.every_s) or (None if age > 2 * self.every_s + 30 else False)


def agent_of(attempt: str) -> str:
    """Return the name of the watcher that the script of an attempt starts."""
    return f"{AGENT}-{attempt}"


def own_beat(name: str, **fields: Any) -> Beat:
    """Return a beat of this process, now."""
    pid = os.getpid()
    return Beat(name=name, host=socket.gethostname(), pid=pid, start_ticks=start_ticks(pid), time=time.time(), **fields)


def write_beat(run: RunDir, beat: Beat) -> None:
    """Replace the watcher's sign of life. Raises OSError if it cannot be written."""
    write_json(run.watcher_file(beat.name), {"schema_version": 1, **asdict(beat), "health": beat.health.value})


def read_beats(run: RunDir) -> list[Beat]:
    """Return the newest sign of every watcher that the run has had, the newest first."""
    found = []
    with suppress(OSError):
        for path in run.watch.glob("*.json"):
            with suppress(RunDirError, TypeError, ValueError, KeyError):
                found.append(_beat(read_json(path)))
    return sorted(found, key=lambda beat: beat.time, reverse=True)


def _beat(document: Mapping[str, Any]) -> Beat:
    known = {name: document[name] for name in Beat.__slots__ if name in document}
    return Beat(**{**known, "health": Health(known["health"]), "blind": tuple(known.get("blind") or ())})
