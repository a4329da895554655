"""Which steps were done again after a recovery, and whether samples were lost, by the records of steps.

Each record has what was consumed by the end of its step. The state after step N fixes the samples of step N + 1. So
the first step of a generation must have consumed what step N had, and one batch more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bigsci_launch.runs.events import read_last_events
from bigsci_launch.runs.generations.records import FIRST_STEP, Recovery
from bigsci_launch.runs.layout import AttemptDir, rank_files

TAIL_BYTES = 1 << 20
CLOCKS_APART_S = 5.0
"""How much the clocks of a rank and of the controller may differ, for a step to be known as the first after a recovery.
"""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A finished step: when it was recorded, the samples consumed by its end, and the size of its batch."""

    step: int
    time: float
    consumed: int
    size: int | None


def read_recorded_steps(attempt: AttemptDir) -> list[RecordedStep]:
    """Return the newest steps of all ranks that report some, in the order in which they were recorded."""
    found: list[RecordedStep] = []
    for path in rank_files(attempt.events, ".jsonl").values():
        found += _steps(read_last_events(path, TAIL_BYTES))
    return sorted(found, key=lambda each: each.time)


def _steps(records: Iterable[Mapping[str, Any]]) -> Iterable[RecordedStep]:
    for record in records:
        step, consumed, size = (record.get(name) for name in ("step", "consumed_samples", "global_batch_size"))
        if record.get("kind") == "step" and isinstance(step, int) and isinstance(consumed, int):
            moment = float(record.get("time") or 0.0)
            yield RecordedStep(step, moment, consumed, size if isinstance(size, int) else None)


def replayed_steps(found: Recovery, steps: Sequence[RecordedStep]) -> int | None:
    """Return how many finished steps were done again: those that were recorded before, if any were, else what the
    controller knows. Ranks tell it their steps once a second, and it may have missed some."""
    again = [before for before, after in pairwise(steps) if _is_first(after, found) and before.step >= after.step]
    if not again or found.step is None:
        return found.replayed
    return max(again[-1].step - found.step, found.replayed or 0)


def lost_samples(found: Recovery, steps: Sequence[RecordedStep]) -> int | None:
    """Return how many samples no step has consumed because of this recovery, negative if some were consumed twice;
    None if the records do not show it. A step that is done again consumes again what it had."""
    if found.needed_no_step:
        return 0
    first = next((each for each in reversed(steps) if _is_first(each, found)), None)
    before = next((each.consumed for each in steps if each.step == found.step), 0 if found.step == 0 else None)
    if first is None or before is None or first.size is None:
        return None
    return first.consumed - first.size - before


def _is_first(each: RecordedStep, found: Recovery) -> bool:
    """Whether it is the first step after a recovery, by its number and its time."""
    began, phase = found.generation.began, found.generation.phases.get(FIRST_STEP)
    if found.step is None or began is None or phase is None or phase.seconds is None:
        return False
    return each.step == found.step + 1 and abs(each.time - began - phase.seconds) < CLOCKS_APART_S
