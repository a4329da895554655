"""What became of an injured run, in comparison with the undisturbed one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json
from recovering.cases import STEPS, Case
from recovering.injured_run import BSL, Done, read_generations, steps_of

TOLERANCE = 1e-6
"""Largest relative difference of a loss where the number of data-parallel replicas has changed."""
PHASES = ("noticed", "left", "joined", "restored", "first step", "total")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run. `problems` is empty if it did what was promised.

    `said` is what the controller says if the run could not continue. `seconds` are those of each recovery that ended
    with a finished step: how long after the injury it was noticed, and then how long each phase took.
    """

    case: Case
    exit_code: int
    num_done: int
    num_generations: int
    dp: int
    said: str
    sources: tuple[str, ...]
    problems: tuple[str, ...]
    largest_difference: float
    steps_replayed: int
    seconds: tuple[dict[str, float], ...]

    @classmethod
    def of_document(cls, document: dict[str, Any], case: Case) -> Outcome:
        """Return the outcome that a line of outcomes.jsonl holds."""
        lists = {name: tuple(document[name]) for name in ("sources", "problems", "seconds")}
        return cls(**{**document, **lists, "case": case})


def judge(case: Case, code: int, done: list[Done], run: RunDir, reference: RunDir) -> Outcome:
    """Compare a run with the undisturbed one."""
    attempt, sound = run.latest_attempt(), reference.latest_attempt()
    assert attempt is not None and sound is not None
    records = read_generations(attempt)
    said = next((record["why"] for record in records if record["event"] == "gave_up"), "")
    began = [record for record in records if record["event"] == "began"]
    dp = began[-1]["topology"]["dp"] if began else 0
    problems, difference, replayed = [], 0.0, 0
    if len(done) < len(case.injuries):
        problems.append(f"only {len(done)} of {len(case.injuries)} injuries could be done")
    if code == 0:
        difference, replayed, found = _compare_losses(case, attempt, sound, dp)
        problems += found
        problems += _compare_weights(case, run, reference, dp)
        reason = read_json(attempt.exit)["reason"]
        problems += [] if reason == "finished" else [f"exit.json says {reason}"]
    elif not said:
        problems.append(f"ended with {code}, and the controller does not say why")
    return Outcome(
        case=case,
        exit_code=code,
        num_done=len(done),
        num_generations=len(began),
        dp=dp,
        said=said,
        sources=tuple(record["source"] for record in records if record.get("phase") == "restored"),
        problems=tuple(problems),
        largest_difference=difference,
        steps_replayed=replayed,
        seconds=tuple(recoveries(records, [each.time for each in done])),
    )


def _compare_losses(case: Case, attempt: AttemptDir, sound: AttemptDir, dp: int) -> tuple[float, int, list[str]]:
    """Return the largest relative difference of a loss, the steps that were done again, and problems."""
    mine, theirs = steps_of(attempt, case.layout), steps_of(sound, case.layout)
    kept, wanted = {each["step"]: each for each in mine}, {each["step"]: each for each in theirs}
    problems = []
    if sorted(kept) != list(range(1, STEPS + 1)):
        problems.append(f"steps without a record: {sorted(set(range(1, STEPS + 1)) - set(kept))}")
    differences = [abs(kept[step]["loss"] - wanted[step]["loss"]) / wanted[step]["loss"] for step in kept]
    exact = [step for step in kept if kept[step]["loss_hex"] != wanted[step]["loss_hex"]]
    largest = max(differences, default=0.0)
    if dp == case.layout.dp and exact:
        problems.append(f"losses differ from step {min(exact)} on (largest relative difference {largest:.2e})")
    elif largest > TOLERANCE:
        problems.append(f"losses differ by {largest:.2e}")
    apart = [step for step in kept if kept[step]["consumed_samples"] != wanted[step]["consumed_samples"]]
    if apart:
        problems.append(f"samples consumed differ in steps {apart}")
    return largest, len(mine) - len(kept), problems


def _compare_weights(case: Case, run: RunDir, reference: RunDir, dp: int) -> list[str]:
    folders = [str(each.checkpoints / f"global_step{STEPS}") for each in (reference, run)]
    command = [sys.executable, "-c", BSL, "diff-weights", *folders, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return []
    if dp == case.layout.dp or done.returncode != 1:
        return [f"bsl diff-weights ends with {done.returncode}: {done.stderr[-200:]}"]
    worst = largest_difference(json.loads(done.stdout))
    return [] if worst <= 1e-4 else [f"weights differ by {worst:.2e}"]


def largest_difference(document: Any) -> float:
    """Return the largest absolute difference that an answer of `bsl diff-weights` names, but for random states: another
    layout has its own."""
    found = [0.0]
    if isinstance(document, dict):
        if document.get("likely") == "random state differs":
            return 0.0
        found += [float(value) for key, value in document.items() if key == "max_abs" and value is not None]
        found += [largest_difference(value) for value in document.values()]
    elif isinstance(document, list):
        found += [largest_difference(value) for value in document]
    return max(found)


def recoveries(records: Sequence[dict[str, Any]], moments: Sequence[float]) -> list[dict[str, float]]:
    """Return the seconds of the phases of each recovery that ended with a finished step. `moments` are those of all
    injuries, in seconds since the epoch."""
    found = []
    for record in records:
        if record.get("phase") != "first_step" or record["generation"] == 0:
            continue
        number = record["generation"]
        failed = [each for each in records if each["event"] == "failed" and each["generation"] == number - 1]
        began = next(each for each in records if each["event"] == "began" and each["generation"] == number)
        phases = {
            each["phase"]: each["time"] for each in records if each.get("generation") == number and "phase" in each
        }
        injuries = [each for each in moments if failed and each <= failed[0]["noticed"] + 0.05]
        if not injuries:
            continue
        hurt, noticed = injuries[-1], failed[0]["noticed"]
        found.append(
            {
                "noticed": noticed - hurt,
                "left": began["time"] - noticed,
                "joined": phases["joined"] - began["time"],
                "restored": phases["restored"] - phases["joined"],
                "first step": phases["first_step"] - phases["restored"],
                "total": phases["first_step"] - hurt,
            }
        )
    return found


def phase_table(found: Sequence[dict[str, float]], title: str) -> list[str]:
    """Return the table of the seconds of each phase; `found` are those of recoveries."""
    lines = [f"| {title} | p50 | p95 | largest |", "|---|---|---|---|"]
    for phase in PHASES if found else ():
        seconds = sorted(each[phase] for each in found)
        values = (quantile(seconds, 0.5), quantile(seconds, 0.95), seconds[-1])
        lines.append(f"| {phase} | " + " | ".join(f"{value:.2f} s" for value in values) + " |")
    return lines


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]
