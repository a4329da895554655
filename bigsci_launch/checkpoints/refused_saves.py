"""Saves that the disk has refused since the newest checkpoint, as rank 0 records them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bigsci_launch.runs.events import read_last_events
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.runs.watching.typed import typed
from bigsci_launch.topology.naming import name_ranks

_TAIL_BYTES = 4 << 20
"""Heartbeats of all steps between two tries are behind the record."""


@dataclass(frozen=True, slots=True)
class RefusedSaves:
    """Saves of an attempt that fail now. Steps count optimizer steps done; times are in seconds since the epoch.

    `since` is the step of the first one, `step` and `time` those of the last, `newest` the step of the newest
    checkpoint, None if there is none. `text` says what the disk refused and where, `errno` is its name, `ranks` are
    those whose parts it refused, `node` is that of the first. `retry` is when it is tried again at the latest.
    """

    since: int
    step: int
    newest: int | None
    ranks: tuple[int, ...]
    node: str | None
    path: str | None
    errno: str | None
    text: str
    hint: str | None
    time: float
    retry: float

    @property
    def sentence(self) -> str:
        newest = "there is no checkpoint" if self.newest is None else f"the newest checkpoint is of step {self.newest}"
        return f"{newest}: saves fail since step {self.since}: {self.cause}"

    @property
    def cause(self) -> str:
        where = f" on {self.node}" if len(self.ranks) == 1 and self.node else ""
        return f"{self.text.removeprefix(f'{self.path}: ')} ({name_ranks(self.ranks)}{where})"


def read_refused_saves(attempt: AttemptDir) -> RefusedSaves | None:
    """Return the saves that fail now; None if the last one worked, if none was due, or if nothing shows it."""
    events = read_last_events(attempt.event_file(0), _TAIL_BYTES, holding=b'"save')
    last = next((event for event in reversed(events) if event.get("kind") in ("save", "save_refused")), None)
    if last is None or last["kind"] == "save":
        return None
    with suppress(ValueError, LookupError, TypeError):
        return typed(RefusedSaves, _fields(last))
    return None


def _fields(event: dict[str, Any]) -> dict[str, Any]:
    retry = float(event["time"]) + float(event["retry_s"])
    return {**event, "since": event["refused_since"], "retry": retry}
