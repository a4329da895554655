"""The records of a run that starts itself again: `chain.json` (its bounds) and `next.json` (what was decided).

The program of the job script reads the first and writes the second.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.layout import AttemptDir, read_json, write_json

SCHEMA_VERSION = 1
Action = Literal["continue", "finished", "stop"]
MadeProgress = Literal["made", "none", "unknown"]


@dataclass(frozen=True, slots=True)
class ChainRecord:
    """Contents of `chain.json`. `only_preempted`: `slurm.requeue` without `slurm.chain`, which does not gate starts."""

    by: Literal["requeue", "queue"]
    max_starts: int
    max_hours: float | None
    total_steps: int | None
    """Last step of `bsl train`; None for another program, whose progress is read from its logs and checkpoints."""
    only_preempted: bool
    first: str
    """The attempt with which the chain began."""
    after: str | None = None
    """The attempt that this one was queued behind."""
    num_starts: int | None = None
    """Starts of the chain up to this one; None before it has started."""
    links: int = 1
    """Attempts that wait behind the running one, in a chain by queue."""
    is_expedited: bool = False
    """Whether Slurm starts the job again before all others. It also holds a job that fails, unless asked not to."""


@dataclass(frozen=True, slots=True)
class NextRecord:
    """Contents of `next.json`: whether a run continues after a start, and why. `decided` is seconds since the epoch."""

    attempt: str
    action: Action
    sentence: str
    progress: MadeProgress
    step: int | None
    by: Literal["requeue", "queue"]
    num_starts: int
    max_starts: int
    next_attempt: str | None
    next_job_id: str | None
    asked: bool | None
    """Whether Slurm was asked to start the next attempt: False if it refused, None while it is being asked."""
    words: str | None
    """Slurm's words, or why no next attempt is queued."""
    decided: float

    @property
    def continues(self) -> bool:
        """Whether another start follows, as far as the job script knows."""
        return self.action == "continue" and self.asked is not False


def write_chain(attempt: AttemptDir, chain: ChainRecord) -> None:
    document = {"schema_version": SCHEMA_VERSION, **asdict(chain), "started": None, "checkpoint": None}
    write_json(attempt.chain, document)


def read_chain(attempt: AttemptDir) -> ChainRecord | None:
    """Return the chain of an attempt; None if it has none, or an unreadable one."""
    try:
        document = read_json(attempt.chain)
        return ChainRecord(**{name: document[name] for name in ChainRecord.__dataclass_fields__ if name in document})
    except (RunDirError, KeyError, TypeError):
        return None


def read_next(attempt: AttemptDir) -> NextRecord | None:
    """Return what the job script decided; None if it decided nothing (yet)."""
    try:
        document = read_json(attempt.next)
        return NextRecord(**{name: document[name] for name in NextRecord.__dataclass_fields__})
    except (RunDirError, KeyError, TypeError):
        return None


def write_next(attempt: AttemptDir, found: NextRecord) -> None:
    write_json(attempt.next, {"schema_version": SCHEMA_VERSION, **asdict(found)})
