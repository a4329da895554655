"""What an attempt of a rehearsal has shown so far: steps, evaluations, saves, and the step from which it resumed.

`bsl train` records all of them. Another program shows what it prints: steps in one of the known forms or its own,
evaluations, saves and loads as Megatron-LM prints them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bigsci_launch.checkpoints.folder import CheckpointsDir
from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, rank_files, read_json
from bigsci_launch.runs.log_reader import LogReader
from bigsci_launch.runs.logs import BATCH
from bigsci_launch.runs.step_forms import forms_of
from bigsci_launch.safe_files import read_file
from bigsci_launch.step_lines import StepLine, StepReader

_EVALUATED = re.compile(r"validation loss at iteration (\d+)")
_SAVED = re.compile(r"successfully saved checkpoint (?:at|from) iteration\s+(\d+)")
_LOADED = re.compile(r"successfully loaded checkpoint .*?at iteration\s+(\d+)")


@dataclass(frozen=True, slots=True)
class StepSeen:
    """One optimizer step. `exact` is the loss as text that is equal only if the loss is, to the last bit or digit."""

    step: int
    loss: float | None
    exact: str | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Where the program of a rank runs. `start_ticks` and the pid identify it; None if it was not recorded."""

    rank: int
    node: str
    pid: int
    start_ticks: int | None


@dataclass(frozen=True, slots=True)
class AttemptEvidence:
    """What an attempt has shown. Dictionaries go from a step to seconds, None where they were not measured.

    `loaded` is the step of the checkpoint from which it resumed; None if nothing shows that it did. `is_recorded` is
    True for records of `bsl train`, False for lines that a program printed.
    """

    ranks: tuple[RankProcess, ...]
    steps: tuple[StepSeen, ...]
    evaluations: dict[int, float | None]
    saves: dict[int, float | None]
    loaded: int | None
    is_recorded: bool

    @property
    def last_step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    @property
    def last_save(self) -> int:
        return max(self.saves, default=0)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rank.node for rank in self.ranks))


@dataclass
class _Printed:
    steps: dict[int, StepSeen] = field(default_factory=dict)
    evaluations: dict[int, float | None] = field(default_factory=dict)
    saves: dict[int, float | None] = field(default_factory=dict)
    loaded: int | None = None


class EvidenceReader:
    """Reads the evidence of one attempt again and again. Logs are read on from where the last reading ended.

    `bsl train` records everything. Another program may record its steps, by guards or `Survivor`, but not its saves.
    """

    def __init__(self, run: RunDir, attempt: AttemptDir, *, starts_trainer: bool) -> None:
        self._starts_trainer = starts_trainer
        self._run = run
        self._attempt = attempt
        self._logs: dict[int, LogReader] = {BATCH: LogReader(attempt.job_output, BATCH)}
        self._forms = forms_of(attempt)
        self._steps: dict[int, StepReader] = {}
        self._printed = _Printed()
        self._saved_before = self._saved_iteration()

    def read(self) -> AttemptEvidence:
        ranks = tuple(self._ranks())
        files = rank_files(self._attempt.events, ".jsonl").values()
        records = [record for path in files for record in read_events(path)]
        if records and self._starts_trainer:
            return _recorded(ranks, records)
        self._read_logs()
        printed, saved = self._printed, self._saved_iteration()
        saves = {**printed.saves, **({saved: None} if saved is not None and saved != self._saved_before else {})}
        known = {**_recorded_steps(records), **printed.steps}
        steps = tuple(known[step] for step in sorted(known))
        return AttemptEvidence(ranks, steps, dict(printed.evaluations), saves, printed.loaded, is_recorded=False)

    def _ranks(self) -> Iterator[RankProcess]:
        for rank, path in rank_files(self._attempt.pids, ".json").items():
            with suppress(RunDirError, KeyError, TypeError, ValueError):
                document = read_json(path)
                yield RankProcess(rank, str(document["node"]), int(document["pid"]), document.get("start_ticks"))

    def _read_logs(self) -> None:
        for rank, path in rank_files(self._attempt.logs, ".log").items():
            self._logs.setdefault(rank, LogReader(path, rank))
        for rank, reader in self._logs.items():
            steps = self._steps.setdefault(rank, StepReader(self._forms))
            for line in reader.new_lines():
                self._note(line.text, steps.read(line.text))

    def _note(self, text: str, seen: StepLine | None) -> None:
        if seen is not None and seen.step is not None and not seen.is_evaluation:
            exact = None if seen.loss is None else repr(seen.loss)
            self._printed.steps[seen.step] = StepSeen(seen.step, seen.loss, exact, seen.seconds)
        for match in _EVALUATED.finditer(text):
            self._printed.evaluations[int(match[1])] = None
        for match in _SAVED.finditer(text):
            self._printed.saves[int(match[1])] = None
        for match in _LOADED.finditer(text):
            self._printed.loaded = int(match[1])

    def _saved_iteration(self) -> int | None:
        """The step in Megatron's file in the run's own folder of checkpoints; None if the program saves elsewhere."""
        try:
            return int(read_file(CheckpointsDir(self._run.checkpoints).latest_iteration, follow=True))
        except (OSError, ValueError):
            return None


def _recorded(ranks: tuple[RankProcess, ...], records: list[dict[str, Any]]) -> AttemptEvidence:
    steps = _recorded_steps(records)
    loads = [record["checkpoint_step"] for record in _of_kind(records, "load")]
    return AttemptEvidence(
        ranks=ranks,
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=_slowest(records, "evaluation"),
        saves=_slowest(records, "save"),
        loaded=loads[-1] if loads else None,
        is_recorded=True,
    )


def _recorded_steps(records: list[dict[str, Any]]) -> dict[int, StepSeen]:
    return {
        record["step"]: StepSeen(record["step"], record.get("loss"), record.get("loss_hex"), record.get("seconds"))
        for record in _of_kind(records, "step")
    }


def _of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record.get("kind") == kind]


def _slowest(records: list[dict[str, Any]], kind: str) -> dict[int, float | None]:
    """Return the seconds that the slowest rank needed, by step."""
    found: dict[int, float | None] = {}
    for record in _of_kind(records, kind):
        found[record["step"]] = max(found.get(record["step"]) or 0.0, record.get("seconds") or 0.0)
    return found
