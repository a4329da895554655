"""Where a foreign loop's records go: into the attempt that `bsl submit` has started, into a file, or nowhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bigsci_launch.runs.events import EventWriter
from bigsci_launch.topology import Coordinate

if TYPE_CHECKING:
    from bigsci_launch.train.rank.events import RankReport


class GuardRecords(Protocol):
    """What guards record of a rank. `step` is the current step. Never blocks training."""

    step: int

    def event(self, event: str, **fields: Any) -> None:
        """Record an event of the current step."""


class LoopRecords:
    """The records of a loop in a file of its own, one JSON document a line, or nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._writer = EventWriter(path) if path else None
        self.step = 0

    def start(self, coordinate: Coordinate) -> None:
        """Record where this rank is."""
        self.event("start", coordinate=coordinate.as_dict(), pid=os.getpid())

    def phase(self, name: str) -> None:
        """Record that the rank has entered a phase: init, load, step, save or end."""
        self.event("heartbeat", phase=name)

    def event(self, event: str, **fields: Any) -> None:
        if self._writer:
            self._writer.write(event, step=self.step, **fields)

    def end(self, reason: str) -> None:
        """Record that the rank ended as requested, and why."""
        self.event("end", reason=reason)

    def fail(self, error: BaseException) -> None:
        self.end(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self._writer:
            self._writer.close()


def open_records(events: Path | str | bool | None, environ: Mapping[str, str]) -> LoopRecords | RankReport:
    """Return where the records go: into the file `events`, nowhere if that is False, and otherwise into the attempt.

    `BSL_RUN_DIR` and `BSL_ATTEMPT` name the attempt, as `bsl submit` sets them for each rank. Without them, nothing
    is kept.

    Raises:
        ConfigError: the attempt is named, but does not exist.
    """
    if isinstance(events, (str, Path)):
        return LoopRecords(Path(events))
    if events is False or not environ.get("BSL_ATTEMPT"):
        return LoopRecords(None)
    # Needs the schema of run files, which a loop of its own has no other use for.
    from bigsci_launch.train.rank.events import RankReport
    from bigsci_launch.train.rank.identity import this_rank

    return RankReport(this_rank())
