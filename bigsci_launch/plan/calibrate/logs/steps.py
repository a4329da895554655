"""What is common to logs of all programs: which steps count, and what must be known of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from statistics import median
from typing import Any, TypeVar

from bigsci_launch.plan.calibrate.rows import REQUIRED

_Kind = TypeVar("_Kind", bound=Hashable)

WARM_UP_STEPS = 2
"""First steps of a job that are not counted, because they compile, allocate and fill caches."""


def typical_step(steps: Iterable[tuple[_Kind, float]]) -> tuple[_Kind, float] | None:
    """Return the most common kind of step and the median figure of its steps, without the first steps."""
    counted = list(steps)[WARM_UP_STEPS:]
    if not counted:
        return None
    kind = Counter(kind for kind, _ in counted).most_common(1)[0][0]
    return kind, median(figure for other, figure in counted if other == kind)


AS_A_ROW = "give the run as a row of a CSV file (docs/how-to/plan.md lists its columns)"
"""What to do with a log that leaves something out."""


def require_sizes(cells: Mapping[str, str], program: str) -> None:
    """Raise ValueError if a log leaves out what a setup needs; the reason says what it has, which makes a row."""
    missing = [column for column in REQUIRED if not cells.get(column)]
    if missing:
        said = ", ".join(f"{column} {text}" for column, text in cells.items() if text)
        raise ValueError(f"this log of {program} lacks {', '.join(missing)}; it has {said}; with the rest, {AS_A_ROW}")


def section_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a configuration, or an empty one."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}
