"""What is new in the logs and records of a run: of one log that any program writes, or of all files of an attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.layout import AttemptDir, rank_files
from bigsci_launch.runs.step_forms import forms_of
from bigsci_launch.step_lines import StepForm
from bigsci_launch.watch.judge.log_event import LogEvent
from bigsci_launch.watch.read.log_lines import OUTPUT, LineReader
from bigsci_launch.watch.read.records import read_generation_record, read_record
from bigsci_launch.watch.read.ring_heads import RingHeads
from bigsci_launch.watch.read.tail import MOST_BYTES, FileTail, Growth, read_beginning

PEEK_BYTES = 1 << 16
"""Of each log of an attempt, this is read at first; of those that have steps, `MOST_BYTES`."""
BEGINNING_BYTES = 1 << 18
"""Programs print their arguments here."""
MOST_WITH_HISTORY = 4
MOST_TROUBLES = 3

PROGRESS = frozenset({"step", "evaluated", "saving", "saved"})
INFORMATIVE = PROGRESS | {"phase"}


class Tail:
    """Log events in one file. `trouble` is why it could not be read the last time; None if it could.

    `num_skipped` is how many bytes it left out then, because more were new than it reads at a time.
    """

    def __init__(self, path: Path, rank: int | None, history: int) -> None:
        self.path = path
        self.rank = rank
        self.trouble: str | None = None
        self.num_skipped = 0
        self._tail = FileTail(path, history)

    def read(self) -> list[LogEvent]:
        """Return what is new, the oldest first."""
        growth = self._tail.read()
        self.trouble, self.num_skipped = growth.trouble, growth.num_skipped
        return self._see(growth)

    @property
    def troubles(self) -> tuple[str, ...]:
        """What could not be seen the last time."""
        return (self.trouble,) if self.trouble else ()

    blind = troubles

    def read_history(self) -> list[LogEvent]:
        """Read the file again, with more of what it held before, and return all of that."""
        self._tail = FileTail(self.path)
        return self.read()

    def _see(self, growth: Growth) -> list[LogEvent]:
        raise NotImplementedError


class LogTail(Tail):
    """Log events in the log of any program; those lines that say nothing are one log event of `output` at the end."""

    def __init__(
        self,
        path: Path,
        rank: int | None = None,
        history: int = MOST_BYTES,
        forms: Sequence[StepForm] | None = None,
    ) -> None:
        super().__init__(path, rank, history)
        self._forms = forms
        self._lines = LineReader(rank, forms)
        self._may_begin = rank in (None, 0)
        """Whether arguments may be printed at its beginning: the first rank of Megatron does."""

    def _see(self, growth: Growth) -> list[LogEvent]:
        if growth.is_new_file:
            self._lines = LineReader(self.rank, self._forms)
        settings = self._settings() if self._may_begin and growth.num_skipped else []
        self._may_begin = self._may_begin and not growth.grown
        seen = [log_event for line in growth.lines if (log_event := self._lines.read(line)) is not None]
        told = [log_event for log_event in seen if log_event is not OUTPUT]
        is_torn = growth.grown and not growth.lines  # the beginning of a line is a sign of life too
        has_output = is_torn or len(told) < len(seen)
        return settings + told + ([LogEvent("output", rank=self.rank)] if has_output else [])

    def _settings(self) -> list[LogEvent]:
        """Return the arguments at the beginning of a log whose end alone is read."""
        reader = LineReader(self.rank)
        seen = (reader.read(line) for line in read_beginning(self.path, BEGINNING_BYTES))
        return [log_event for log_event in seen if log_event and log_event.kind == "settings"]


class RecordTail(Tail):
    """Log events in the records of one rank."""

    def __init__(self, path: Path, rank: int, history: int = MOST_BYTES) -> None:
        super().__init__(path, rank, history)
        self._own = rank

    def _see(self, growth: Growth) -> list[LogEvent]:
        return [found for line in growth.lines if (found := read_record(line, self._own)) is not None]


class GenerationTail(Tail):
    """Log events in the records of the controller of `survive`."""

    def _see(self, growth: Growth) -> list[LogEvent]:
        return [found for line in growth.lines if (found := read_generation_record(line)) is not None]


class AttemptTail:
    """Log events in all logs, records and rings of an attempt; files that appear later are found.

    `troubles` lists what could not be seen the last time; `blind` is that part of it which may hold progress.
    `num_skipped` is how many bytes were left out. Where ranks record their steps, what is printed about them is mere
    output: it says the same.
    """

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._forms = forms_of(attempt)
        self._tails: dict[Path, Tail] = {}
        self._rings = RingHeads(attempt)
        self._num_with_history = 0
        self._records_steps = False
        self._informative: set[Path] = set()
        self.troubles: tuple[str, ...] = ()
        self.blind: tuple[str, ...] = ()
        self.num_skipped = 0

    def read(self) -> list[LogEvent]:
        """Return what is new: of each file the oldest first; generations, the records of ranks, logs, then calls."""
        troubles = self._find_files()
        read = [(tail, self._read(tail)) for tail in self._tails.values()]
        generations = [found for tail, seen in read if isinstance(tail, GenerationTail) for found in seen]
        recorded = [found for tail, seen in read if isinstance(tail, RecordTail) for found in seen]
        printed = [found for tail, seen in read if isinstance(tail, LogTail) for found in seen]
        self._records_steps = self._records_steps or any(found.kind == "step" for found in recorded)
        if self._records_steps:
            printed = [replace(found, kind="output") if found.kind in PROGRESS else found for found in printed]
        self.num_skipped = sum(tail.num_skipped for tail in self._tails.values())
        self._informative |= {tail.path for tail, seen in read if any(found.kind in INFORMATIVE for found in seen)}
        in_trouble = [tail for tail in self._tails.values() if tail.trouble]
        of_use = [tail for tail in in_trouble if tail.path in self._informative or not self._informative]
        self.troubles = _shorten(troubles + [tail.trouble for tail in in_trouble if tail.trouble])
        self.blind = _shorten(troubles + [tail.trouble for tail in of_use if tail.trouble])
        calls = [LogEvent("call")] if self._rings.have_moved() else []
        return generations + recorded + printed + calls

    def _find_files(self) -> list[str]:
        troubles: list[str] = []
        for rank, path in _files(self._attempt.events, ".jsonl", troubles).items():
            self._tails.setdefault(path, RecordTail(path, rank, PEEK_BYTES))
        for rank, path in _files(self._attempt.logs, ".log", troubles).items():
            self._tails.setdefault(path, LogTail(path, rank, PEEK_BYTES, self._forms))
        if (controller := self._attempt.generations) not in self._tails and controller.exists():
            self._tails[controller] = GenerationTail(controller, None, MOST_BYTES)
        if (batch := self._attempt.job_output) not in self._tails and batch.exists():
            self._tails[batch] = LogTail(batch, None, PEEK_BYTES, self._forms)
        return troubles

    def _read(self, tail: Tail) -> list[LogEvent]:
        """Return what is new; a file that has steps, but was too long for a first peek, is read with more history."""
        found = tail.read()
        has_steps = any(log_event.kind == "step" for log_event in found)
        if not (has_steps and tail.num_skipped and self._num_with_history < MOST_WITH_HISTORY):
            return found
        self._num_with_history += 1
        return [log_event for log_event in found if log_event.kind == "settings"] + tail.read_history()


def _files(folder: Path, suffix: str, troubles: list[str]) -> dict[int, Path]:
    try:
        return rank_files(folder, suffix)
    except RunDirError as error:
        troubles.append(str(error))
        return {}


def _shorten(troubles: list[str]) -> tuple[str, ...]:
    more = len(troubles) - MOST_TROUBLES
    return (*troubles[:MOST_TROUBLES], *([f"and {more} more files"] if more > 0 else []))
