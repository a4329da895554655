"""What the controller learns, and what it orders. Values only: `state_machine` turns the one into the other."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from bigsci_launch.recover.generation import Slot
from bigsci_launch.runs.control.request import Request

# ------------------------------------------------------------------------------------------------ what happens


@dataclass(frozen=True, slots=True)
class SlotJoined:
    """A runner has connected."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class SlotLost:
    """A runner is gone. `is_silent`: it sent nothing, and its connection was not closed either."""

    slot: int
    why: str
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class SlotNeverCame:
    """A runner has ended, perhaps before it connected."""

    slot: int
    code: int


@dataclass(frozen=True, slots=True)
class SlotReady:
    """A slot can take a rank. `generation` is the newest that it knows to be over, `port` is free on its host."""

    slot: int
    generation: int | None
    port: int


@dataclass(frozen=True, slots=True)
class SlotUnfit:
    """A check after the death of a rank has found its node broken."""

    slot: int
    words: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The process in a slot has ended; `generation` and `rank` are None for one that only waited."""

    slot: int
    generation: int | None
    rank: int | None
    code: int | None
    signal: str | None
    time: float | None
    was_requested: bool
    is_final: bool
    words: str | None

    @property
    def is_good(self) -> bool:
        return self.code == 0

    @property
    def status(self) -> int:
        """The exit code that the job has if this rank decides it; never 0."""
        if self.signal is not None and self.signal in signal.Signals.__members__:
            return 128 + signal.Signals[self.signal]
        return self.code or 1


@dataclass(frozen=True, slots=True)
class RankSaid:
    """A word of the process in a slot, with what belongs to it."""

    slot: int
    generation: int | None
    word: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RanksSeen:
    """What a generation has left on disk: its newest step, None if it is not known; and the last words of ranks.

    `accused`: whom a guard accuses that has ended a rank, by that rank; empty if it accuses none.
    """

    generation: int
    step: int | None
    words: Mapping[int, str]
    accused: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Archived:
    """The records of the ranks of a generation have been moved out of the way."""

    generation: int


@dataclass(frozen=True, slots=True)
class RunnersEnded:
    """Every runner has ended, or the program that started them."""

    code: int


@dataclass(frozen=True, slots=True)
class Terminated:
    """The job was asked to end."""

    signal: int


JobEvent: TypeAlias = (
    SlotJoined
    | SlotLost
    | SlotNeverCame
    | SlotReady
    | SlotUnfit
    | RankEnded
    | RankSaid
    | Request
    | RanksSeen
    | Archived
    | RunnersEnded
    | Terminated
)

# ------------------------------------------------------------------------------------------------ what is done about it


@dataclass(frozen=True, slots=True)
class SendToSlot:
    slot: int
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StartRunner:
    """Start the runner of a slot of this machine again; `runner_pid` is the one that it follows."""

    slot: int
    runner_pid: int


@dataclass(frozen=True, slots=True)
class DropSlot:
    """Close the connection of a slot: its runner then ends everything there."""

    slot: int
    why: str


@dataclass(frozen=True, slots=True)
class RecordLine:
    """Write a line of generations.jsonl."""

    event: str
    generation: int | None
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ArchiveRecords:
    """Move the records of ranks away, so that the next generation begins without any. `Archived` is the answer."""

    generation: int


@dataclass(frozen=True, slots=True)
class LookAtRanks:
    """Look for the last words of ranks, and for the newest step since `since` (None: not needed). `RanksSeen` is the
    answer."""

    generation: int
    ranks: tuple[int, ...]
    since: float | None


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Remember a node as bad."""

    node: str
    reason: Literal["lost", "failed_check"]
    evidence: str


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """Say what became of a request of a watcher; `refused` says why it was not granted."""

    request: Request
    refused: str | None


@dataclass(frozen=True, slots=True)
class SayLine:
    """Write a line to the output of the attempt."""

    text: str


@dataclass(frozen=True, slots=True)
class FinishJob:
    """The job is over, with this exit code. Every slot has been notified."""

    code: int


SlotOrder: TypeAlias = (
    SendToSlot
    | StartRunner
    | DropSlot
    | RecordLine
    | ArchiveRecords
    | LookAtRanks
    | LeaveOut
    | RequestAnswer
    | SayLine
    | FinishJob
)
