"""Whether samples were lost between two generations, by the records of steps: each says what was consumed by its end.

The state after step N fixes the samples of step N + 1. So the first step of a generation must have consumed what step
N had, and one batch more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bigsci_launch.runs.events import read_last_events
from bigsci_launch.runs.generations.records import Recovery
from bigsci_launch.runs.layout import AttemptDir, rank_files

TAIL_BYTES = 1 << 20
Consumed = tuple[int, int, int | None]
"""A step as it was recorded: its number, the samples consumed by its end, the size of its batch."""


def read_consumed(attempt: AttemptDir) -> list[Consumed]:
    """Return the newest steps of all ranks that report some, in the order in which they were recorded."""
    found: list[tuple[float, Consumed]] = []
    for path in rank_files(attempt.events, ".jsonl").values():
        found += _steps(read_last_events(path, TAIL_BYTES))
    return [each for _, each in sorted(found)]


def _steps(records: Iterable[Mapping[str, Any]]) -> Iterable[tuple[float, Consumed]]:
    for record in records:
        step, consumed, size = (record.get(name) for name in ("step", "consumed_samples", "global_batch_size"))
        if record.get("kind") == "step" and isinstance(step, int) and isinstance(consumed, int):
            yield float(record.get("time") or 0.0), (step, consumed, size if isinstance(size, int) else None)


def lost_samples(found: Recovery, consumed: Sequence[Consumed]) -> int | None:
    """Return how many samples no step has consumed because of this recovery, negative if some were consumed twice;
    None if the records do not show it. A replayed step consumes again what its first attempt had."""
    if found.step is None or found.first_step is None:
        return None
    reports = [(total, size) for step, total, size in consumed if step == found.step + 1]
    before = next((total for step, total, _ in consumed if step == found.step), 0 if found.step == 0 else None)
    if not reports or before is None or reports[-1][1] is None:
        return None
    total, size = reports[-1]
    return total - (size or 0) - before
