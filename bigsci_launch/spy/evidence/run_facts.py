"""What a run wrote about its own ranks, as values: how each ended, what it raised, which phase it was in last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from signal import Signals
from typing import Any


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank ended, from the record of its runner: exit code, or name of the signal; when (wall clock, seconds).

    `was_terminated`: the runner had been asked to stop before, so this end is a consequence and not the cause.
    """

    code: int | None
    signal: str | None
    time: float
    was_terminated: bool

    @property
    def is_clean(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if self.code is None and not self.signal:
            return "exit status unknown: its runner was killed first"
        return f"killed by {self.signal}" if self.signal else f"exit code {self.code}"


def parse_end(end: Mapping[str, Any] | None, node: Mapping[str, Any]) -> Exit | None:
    """Return how a process has ended that its parent has not reaped, from the document of its node."""
    if not end:
        return None
    number = end.get("signal")
    name = None if number is None else next((each.name for each in Signals if each == number), f"signal {number}")
    return Exit(end.get("code"), name, float(node.get("time") or 0.0), False)


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often the launcher has started all ranks again, how often it may (None if not known), and seconds since the
    present start."""

    number: int
    limit: int | None
    age_s: float


def parse_restarts(nodes: Iterable[Mapping[str, Any]]) -> Restarts | None:
    """Return the restarts of the ranks that were found, by what their launcher has put into their environment."""
    found = [rank for node in nodes for rank in node.get("ranks", []) if rank.get("restarts")]
    ages = [float(rank["age_s"]) for rank in found if rank.get("age_s") is not None]
    if not ages:
        return None
    number, *limit = max(list(map(int, rank["restarts"])) for rank in found)
    return Restarts(number, limit[0] if limit else None, min(ages))


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a rank reported: `words` are type and message, `place` is where it was raised, `time` is wall
    clock in seconds (0 if it is not known), `source` is the record that holds it."""

    words: str
    place: str
    time: float
    source: str

    def __str__(self) -> str:
        return f"{self.words}{f' at {self.place}' if self.place else ''}"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank's own last record: which phase it entered (`step`, `save`, `eval`, `end`), in which step, when.

    `first_step` is the first step since its start, if known.
    """

    phase: str
    step: int
    time: float
    first_step: int | None = None


@dataclass(frozen=True, slots=True)
class NewLines:
    """What a rank has printed while it was looked at: how many lines, the last of them, and the step that the last
    line in the format of trainers names, or None."""

    rank: int
    num_lines: int
    last: str
    step: int | None


class RunRecords:
    """What the run itself wrote about its ranks, by rank."""

    def __init__(self, collection: Mapping[str, Any]) -> None:
        self._tables = {
            table: {int(record["rank"]): record for record in reversed(collection.get(table) or [])}
            for table in ("exits", "errors", "tracebacks", "heartbeats")
        }

    def of(self, rank: int) -> dict[str, Any]:
        """Return the fields of `RankEvidence` that come from records."""
        exit_record, error, traceback, heartbeat = (each.get(rank) for each in self._tables.values())
        return {
            "exit": parse_exit(exit_record),
            "error": parse_error(error),
            "failure": parse_failure(error or traceback),
            "heartbeat": parse_heartbeat(heartbeat),
        }


def parse_failure(record: Mapping[str, Any] | None) -> Failure | None:
    """Parse the exception of an error file or of a log."""
    if record is None:
        return None
    error_type, message = record.get("type"), record.get("message")
    words = f"{error_type}: {message}" if message else str(error_type)
    return Failure(
        words, str(record.get("place") or ""), float(record.get("time") or 0), str(record.get("source") or "")
    )


def parse_heartbeat(record: Mapping[str, Any] | None) -> Heartbeat | None:
    if record is None:
        return None
    return Heartbeat(
        phase=str(record.get("phase") or ""),
        step=int(record.get("step") or 0),
        time=float(record.get("time") or 0),
        first_step=record.get("first_step"),
    )


def parse_exit(record: Mapping[str, Any] | None) -> Exit | None:
    if record is None:
        return None
    time, was_terminated = float(record.get("time") or 0), record.get("terminated") is not None
    if record.get("clean_end"):
        return Exit(0, None, time, was_terminated)
    return Exit(record.get("code"), record.get("signal"), time, was_terminated)


def parse_printed(collection: Mapping[str, Any]) -> tuple[NewLines, ...]:
    """Parse what ranks have printed during the look."""
    return tuple(
        NewLines(int(each["rank"]), int(each["lines"]), str(each["last"]), each.get("step"))
        for each in collection.get("printed") or []
    )


def parse_error(record: Mapping[str, Any] | None) -> str | None:
    return f"{record.get('type')}: {record.get('message')}".strip() if record else None
