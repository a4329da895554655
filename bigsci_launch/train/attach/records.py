"""Where a foreign loop's records go: into the attempt that `bsl submit` has started, into a file, or nowhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from bigsci_launch.runs.events import EventWriter
from bigsci_launch.topology import Coordinate


class LoopRecords(Protocol):
    """Records of one rank; `step` is the current step. Never blocks training."""

    step: int

    def start(self, coordinate: Coordinate) -> None:
        """Record where this rank is."""

    def phase(self, name: str) -> None:
        """Record that the rank has entered a phase: init, load, step, save or end."""

    def event(self, event: str, **fields: Any) -> None:
        """Record an event of the current step."""

    def end(self, reason: str) -> None:
        """Record that the rank ended as requested, and why."""

    def fail(self, error: BaseException) -> None:
        """Record why this rank dies."""

    def close(self) -> None:
        """Write what is still queued."""


class JsonLines:
    """The same records in a file of the loop's own, one JSON document a line."""

    def __init__(self, path: Path) -> None:
        self._writer = EventWriter(path)
        self.step = 0

    def start(self, coordinate: Coordinate) -> None:
        self.event("start", coordinate=coordinate.as_dict(), pid=os.getpid())

    def phase(self, name: str) -> None:
        self.event("heartbeat", phase=name)

    def event(self, event: str, **fields: Any) -> None:
        self._writer.write(event, step=self.step, **fields)

    def end(self, reason: str) -> None:
        self.event("end", reason=reason)

    def fail(self, error: BaseException) -> None:
        self.event("end", reason=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._writer.close()


class NoRecords:
    """Keeps nothing."""

    step = 0

    def start(self, coordinate: Coordinate) -> None: ...
    def phase(self, name: str) -> None: ...
    def event(self, event: str, **fields: Any) -> None: ...
    def end(self, reason: str) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def close(self) -> None: ...


def open_records(events: Path | str | bool | None, environ: Mapping[str, str]) -> LoopRecords:
    """Return where the records go: into the file `events`, nowhere if that is False, and otherwise into the attempt.

    `BSL_RUN_DIR` and `BSL_ATTEMPT` name the attempt, as `bsl submit` sets them for each rank. Without them, nothing
    is kept.

    Raises:
        ConfigError: the attempt is named, but does not exist.
    """
    if isinstance(events, (str, Path)):
        return JsonLines(Path(events))
    if events is False or not environ.get("BSL_ATTEMPT"):
        return NoRecords()
    # Needs the schema of run files, which a loop of its own has no other use for.
    from bigsci_launch.train.identity import this_rank
    from bigsci_launch.train.rank_events import RankReport

    return RankReport(this_rank())
