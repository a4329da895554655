"""What a rank leaves for those who watch it: phases, steps, its end or its error. Nothing here blocks training."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from typing import Any

from bigsci_launch.errors import BslError
from bigsci_launch.runs.events import EventWriter
from bigsci_launch.runs.layout import write_json
from bigsci_launch.topology import Coordinate
from bigsci_launch.train.place import Place

# What gloo and NCCL say on the ranks that only lost their partner: the reason is on another rank.
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


class RankReport:
    """Writes the records of one rank. `step` is the step under way; `coordinate` is known once the config is read."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._writer = EventWriter(place.attempt.event_file(place.rank))
        self.step = 0
        self.coordinate: Coordinate | None = None

    def start(self, coordinate: Coordinate) -> None:
        """Say who runs this rank."""
        self.coordinate = coordinate
        self.event(
            "start",
            world_size=self._place.world_size,
            coordinate=coordinate.as_dict(),
            host=self._place.host,
            node=self._place.node,
            pid=os.getpid(),
        )

    def phase(self, name: str) -> None:
        """Say that the rank has just entered phase `name`: init, load, step, save, eval, dump or end."""
        self.event("heartbeat", phase=name)

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event of the step under way."""
        self._writer.write(kind, step=self.step, **fields)

    def end(self, reason: str) -> None:
        """Say that the rank has done what it was asked to."""
        self.phase("end")
        self.event("end", reason=reason)

    def fail(self, error: BaseException) -> None:
        """Write why this rank dies, at once. A disk that cannot take it must not keep the rank from dying."""
        record = {
            "rank": self._place.rank,
            "host": self._place.host,
            "node": self._place.node,
            "coordinate": self.coordinate.as_dict() if self.coordinate else None,
            "step": self.step,
            "type": type(error).__name__,
            "message": str(error),
            "hint": error.hint if isinstance(error, BslError) else None,
            "lost_peer": is_lost_peer(error),
            "traceback": "".join(traceback.format_exception(error)),
            "time": time.time(),
        }
        with contextlib.suppress(OSError):
            write_json(self._place.attempt.error_file(self._place.rank), record)

    def close(self) -> None:
        """Write what is queued."""
        self._writer.close()


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank has gone; that rank knows more."""
    return any(phrase in str(error) for phrase in _PEER_LOST)
