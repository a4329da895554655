"""What became of an attacked run: its numbers next to the undisturbed run's, and what it says of its own end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bigsci_launch.errors import BslError
from bigsci_launch.runs.layout import RunDir, read_json
from recovering.attack import Attack, Expected
from recovering.attacked_run import StartedRun, losses
from recovering.injured_run import BSL, read_generations
from recovering.judged import largest_difference


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table. No `problems`: as expected. `could_not` says why an attack was not made."""

    name: str
    group: str
    what: str
    expected: str
    outcome: str = ""
    said: str = ""
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    could_not: str = ""
    seconds: float = 0.0

    @classmethod
    def of_document(cls, document: dict[str, Any]) -> Row:
        lists = {name: tuple(document[name]) for name in ("notes", "problems")}
        return cls(**{**document, **lists})


@dataclass(frozen=True, slots=True)
class End:
    """What a run says of its own end: exit.json, and `bsl status`."""

    reason: str | None
    rank: int | None
    sources: tuple[str, ...]
    failures: tuple[str, ...]
    gave_up: str

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", first failure rank {self.rank}"
        recovered = f"; from {', '.join(self.sources)}" if self.sources else ""
        ended = f"; ended by {', '.join(self.failures)}" if self.failures else ""
        gave_up = f"; gave up: {self.gave_up}" if self.gave_up else ""
        return f"{self.reason or 'no exit record'}{rank}{recovered}{ended}{gave_up}"


def judge(attack: Attack, started: StartedRun, reference: RunDir, seconds: float) -> Row:
    """Compare a run with the undisturbed one, and what it says with what was expected."""
    end = read_end(started)
    differences = list(_differences(attack, started, reference))
    problems = [*started.problems, *_unexpected(attack.expected, started, end, differences)]
    outcome = "equal" if not differences else f"exit {started.exit_code}: " + "; ".join(differences)
    return Row(
        attack.name,
        attack.group,
        attack.what,
        str(attack.expected),
        outcome,
        str(end),
        tuple(started.notes),
        tuple(problems),
        seconds=seconds,
    )


def read_end(started: StartedRun) -> End:
    """Return what exit.json, `bsl status --json` and the records of the controller say."""
    attempt = started.run.latest_attempt()
    record: dict[str, Any] = {}
    if attempt is not None:
        with suppress(BslError, OSError):
            record = read_json(attempt.exit)
    told = started.status().get("exit") or {}
    if record and (told.get("reason"), told.get("first_failure")) != (
        record.get("reason"),
        record.get("first_failure"),
    ):
        started.problems.append(f"bsl status says {told.get('reason')}, exit.json {record.get('reason')}")
    records = [each for one in started.run.attempts() for each in read_generations(one)]
    failure = (told or record).get("first_failure") or {}
    return End(
        reason=(told or record).get("reason"),
        rank=failure.get("rank"),
        sources=tuple(each["source"] for each in records if each.get("phase") == "restored" and each["generation"]),
        failures=tuple(_failure_words(*each) for each in started.failures()),
        gave_up=next((each["why"] for each in records if each["event"] == "gave_up"), ""),
    )


def _failure_words(kind: str, rank: int | None) -> str:
    return kind if rank is None else f"{kind} of rank {rank}"


def _differences(attack: Attack, started: StartedRun, reference: RunDir) -> Sequence[str]:
    """Return how the run differs from the undisturbed one; nothing if it is equal."""
    mine, theirs = losses(*started.earlier, (started.run, attack.layout)), losses((reference, attack.layout))
    if sorted(mine) != sorted(theirs):
        return [f"{len(mine)} of {len(theirs)} steps"]
    found = []
    apart = [step for step in mine if mine[step]["loss_hex"] != theirs[step]["loss_hex"]]
    largest = max(abs(mine[step]["loss"] - theirs[step]["loss"]) / theirs[step]["loss"] for step in mine)
    if apart and largest >= attack.expected.tolerance:
        found.append(f"losses differ from step {min(apart)} on, by up to {largest:.1e}")
    if any(mine[step]["consumed_samples"] != theirs[step]["consumed_samples"] for step in mine):
        found.append("the samples differ")
    return [*found, *_weights_apart(started.run, reference, max(theirs), attack.expected.tolerance)]


def _weights_apart(run: RunDir, reference: RunDir, step: int, tolerance: float) -> list[str]:
    folders = [str(each.checkpoints / f"global_step{step}") for each in (reference, run)]
    command = [sys.executable, "-c", BSL, "diff-weights", *folders, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return []
    if done.returncode != 1:
        return [f"bsl diff-weights ends with {done.returncode}: {done.stderr[-200:]}"]
    worst = largest_difference(json.loads(done.stdout))
    return [] if tolerance and worst <= 1e-4 else [f"weights differ by {worst:.1e}"]


def _unexpected(expected: Expected, started: StartedRun, end: End, differences: Sequence[str]) -> Sequence[str]:
    found = []
    if expected.equal and (differences or started.exit_code != 0):
        found.append(f"not equal: exit {started.exit_code}, {'; '.join(differences) or 'same numbers'}")
    if expected.equal and end.reason != "finished":
        found.append(f"the record says {end.reason}")
    if expected.reason is not None and end.reason != expected.reason:
        found.append(f"the reason is {end.reason}")
    if expected.rank is not None and end.rank != expected.rank:
        found.append(f"first failure is rank {end.rank}")
    if expected.recovered is not None and end.sources != expected.recovered:
        found.append(f"recovered from {', '.join(end.sources) or 'nothing'}")
    return found
