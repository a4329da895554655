"""`ended.json`: who ended the ranks of an attempt from outside, and why."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.runs.layout import AttemptDir, read_record, write_json

HANG = "end_ranks"
"""What a watcher does to a hang. All other acts are a person's."""
RESTART = "restart"
REQUESTS = {"exit": "to exit", RESTART: "to restart", "kill": "to kill it"}


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
    written: float | None = None
    """When, by the clock of the file system; None before."""

    @property
    def is_hang(self) -> bool:
        return self.act == HANG

    @property
    def intent(self) -> str:
        """Half of the truth where the attempt ended for another reason: `agent was about to end the ranks: ...`."""
        why = f": {self.why}" if self.why else ""
        return f"{self.who} was about to end the ranks{why}" if self.is_hang else self.sentence

    @property
    def sentence(self) -> str:
        """`alice asked to exit: the loss is NaN`; `agent ended the ranks: no step for 62 s`."""
        why = f": {self.why}" if self.why else ""
        if self.is_hang:
            return f"{self.who} ended the ranks{why}"
        after = f" after step {self.step}" if self.step is not None else ""
        return f"{self.who} asked {REQUESTS.get(self.act, 'to end it')}{after}{why}"

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


def read_ended_by(attempt: AttemptDir) -> EndedBy | None:
    """Return who ended the ranks of an attempt; None if it was not ended from outside, or if the record is torn."""
    record = read_record(attempt.ended_by)
    if not record.get("act"):
        return None
    step = record.get("step")
    return EndedBy(
        act=str(record["act"]),
        who=str(record.get("who") or "an unknown user"),
        why=" ".join(str(record.get("why") or "").split()),
        continues=bool(record.get("continues")),
        step=step if isinstance(step, int) else None,
        bundle=record.get("bundle") or None,
        nodes=tuple(str(node) for node in record.get("nodes") or ()),
        written=modified(attempt.ended_by),
    )


def modified(path: Path) -> float | None:
    """Return when a file was written, by the clock of its file system; None if it is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
