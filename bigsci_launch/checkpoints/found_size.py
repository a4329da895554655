"""The micro-batch size that a run with `training.micro_batch_size: auto` has found, and how it came to it.

`micro_batch.json` in the run directory is written by rank 0 whenever the size changes. What a checkpoint holds is the
same without the history. A size is only used again with the same model, layout, device and versions: its fingerprint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.layout import RunDir, read_json, write_json

SCHEMA_VERSION = 1

WhySize = Literal["found", "remembered", "out_of_memory", "thrash"]


@dataclass(frozen=True, slots=True)
class SizeChange:
    """One change of the size; `words` say what it was for, and `step` is the last step done before it."""

    time: float
    step: int
    why: WhySize
    was: int | None
    size: int
    words: str


@dataclass(frozen=True, slots=True)
class FoundSize:
    """The size of micro-batches, and of those of an evaluation, with what they hold for."""

    size: int
    evaluation_size: int
    fingerprint: Mapping[str, Any]
    too_large: int | None = None
    """The smallest size that was seen not to fit."""
    headroom: float | None = None
    """The part of the fullest device's memory that was free at the peak of the trial; None where it is not counted."""
    history: tuple[SizeChange, ...] = field(default=())

    def changed(self, why: WhySize, size: int, *, step: int, words: str) -> FoundSize:
        change = SizeChange(time.time(), step, why, self.size, size, words)
        return replace(self, size=size, history=(*self.history, change))

    @property
    def document(self) -> dict[str, Any]:
        kept = asdict(self)
        del kept["history"]
        return kept


def read_found_size(run: RunDir) -> FoundSize | None:
    """Return what the run has found so far; None if nothing, or if it cannot be read: then it is found again."""
    try:
        return _of_document(read_json(run.micro_batch))
    except (RunDirError, KeyError, TypeError, ValueError):
        return None


def size_of_checkpoint(document: Mapping[str, Any] | None) -> FoundSize | None:
    """Return the size that a checkpoint was saved with; None if it holds none."""
    try:
        return _of_document(document) if document else None
    except (KeyError, TypeError, ValueError):
        return None


def write_found_size(run: RunDir, found: FoundSize) -> None:
    write_json(run.micro_batch, {"schema_version": SCHEMA_VERSION, **asdict(found)})


def _of_document(document: Mapping[str, Any]) -> FoundSize:
    return FoundSize(
        size=int(document["size"]),
        evaluation_size=int(document["evaluation_size"]),
        fingerprint=dict(document["fingerprint"]),
        too_large=document.get("too_large"),
        headroom=document.get("headroom"),
        history=tuple(SizeChange(**each) for each in document.get("history", ())),
    )
