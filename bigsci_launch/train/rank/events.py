"""Records that a rank writes for its watchers: phases, steps, its end or its error. Never blocks training."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, TypeVar

import bigsci_launch
from bigsci_launch.errors import BslError, GuardError
from bigsci_launch.lost_peer import says_lost_peer
from bigsci_launch.runs.events import EventWriter
from bigsci_launch.runs.layout import write_json
from bigsci_launch.topology import Coordinate
from bigsci_launch.train.rank.identity import RankIdentity

T = TypeVar("T")


class RankReport:
    """Writes the records of one rank. `step` is the current step; `coordinate` is known once the config is read."""

    def __init__(self, identity: RankIdentity) -> None:
        self._identity = identity
        self._writer = EventWriter(identity.attempt.event_file(identity.rank))
        self.step = 0
        self.coordinate: Coordinate | None = None

    def start(self, coordinate: Coordinate) -> None:
        """Record where this rank runs, and which code: its host, node, process ID and coordinate."""
        self.coordinate = coordinate
        self.event(
            "start",
            world_size=self._identity.world_size,
            coordinate=coordinate.as_dict(),
            host=self._identity.host,
            node=self._identity.node,
            pid=os.getpid(),
            bigsci_launch_file=bigsci_launch.__file__,
        )

    def phase(self, name: str) -> None:
        """Record that the rank has just entered phase `name`: init, load, step, save, copy, eval, dump or end."""
        self.event("heartbeat", phase=name)
        if (hook := sys.modules.get("ring_hook")) is not None:
            hook.mark(self.step, name)

    def event(self, event: str, **fields: Any) -> None:
        """Record an event, of the current step unless `fields` name another one."""
        self._writer.write(event, **{"step": self.step, **fields})

    def end(self, reason: str) -> None:
        """Record that the rank ended as requested, and why."""
        self.phase("end")
        self.event("end", reason=reason)

    def fail(self, error: BaseException) -> None:
        """Write at once why this rank dies. A disk that refuses the record must not keep the rank alive, and the others
        do not wait for one."""
        record = {
            "rank": self._identity.rank,
            "host": self._identity.host,
            "node": self._identity.node,
            "coordinate": self.coordinate.as_dict() if self.coordinate else None,
            "step": self.step,
            "type": type(error).__name__,
            "message": str(error),
            "hint": error.hint if isinstance(error, BslError) else None,
            "lost_peer": is_lost_peer(error),
            **accusation(error),
            "traceback": "".join(traceback.format_exception(error)),
            "time": time.time(),
        }
        with contextlib.suppress(OSError):
            write_json(self._identity.attempt.error_file(self._identity.rank), record, is_synced=False)

    def close(self) -> None:
        """Write the queued records."""
        self._writer.close()


def each_batch_noted(batches: Iterator[T]) -> Iterator[T]:
    """Return the batches; the ring of this process, if it has one, shows how long it takes to get each of them."""
    hook = sys.modules.get("ring_hook")
    return batches if hook is None else hook.each_batch(batches)


def accusation(error: BaseException) -> dict[str, list[int]]:
    """Return the ranks that a guard accuses, and those that its finding is about; nothing for another error."""
    if not isinstance(error, GuardError):
        return {}
    return {"accused": list(error.accused), "suspects": list(error.suspects)}


def is_lost_peer(error: BaseException) -> bool:
    """Return whether the error only says that a peer is gone; the cause is then on that other rank."""
    return says_lost_peer(f"{type(error).__name__}: {error}")
