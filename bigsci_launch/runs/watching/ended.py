"""`ended.json`: who ended the ranks of an attempt from outside, and why. exit_reason.py and chain.py read it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from bigsci_launch.runs.layout import AttemptDir, write_json


@dataclass(frozen=True, slots=True)
class EndedBy:
    """Why ranks were told to end.

    `act` is `end_ranks` (a watcher ended a hang), `exit`, `kill` or `restart` (a person asked for it). `continues`:
    whether the run may start again by itself. `step` is the one after which a person wanted it to end; None: at once.
    `nodes` are those that the evidence accuses, to be left out of the next attempt for a while. `bundle` is the
    evidence.
    """

    act: str
    who: str
    why: str
    continues: bool
    step: int | None = None
    bundle: str | None = None
    nodes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "act": self.act,
            "who": self.who,
            "why": self.why,
            "continues": self.continues,
            "step": self.step,
            "bundle": self.bundle,
            "nodes": list(self.nodes),
            "time": time.time(),
        }


def write_ended_by(attempt: AttemptDir, ended: EndedBy) -> None:
    """Write it, before the ranks are ended.

    Raises:
        OSError: it cannot be written.
    """
    write_json(attempt.ended_by, ended.as_dict())
