"""Measures what `bsl plan` says of memory, on published peaks, and on layouts that ran or ran out of memory.

    python benchmarks/plan_memory.py                prints the tables
    python benchmarks/plan_memory.py --write        and puts them into docs/measurements/plan-memory.md
    python benchmarks/plan_memory.py --source NAME  prints the rows of one source that were looked at
    python benchmarks/plan_memory.py --keep         keeps the figures as those before a change

A hash of a row's source, model and sequence length, of the playbook its sweep, puts it into one of two parts: a third
was not looked at before the end. What counts as memory differs by source: what torch had in use, what it had
reserved, or all that the GPU had given away.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import page_part

from bigsci_launch.plan.calibrate.rows import MeasuredRow, read_rows, setup_of
from bigsci_launch.plan.price.calibration import expected_on
from bigsci_launch.plan.price.hardware import model_named
from bigsci_launch.plan.price.price import Price, price_setup

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks/rows"
FILES = (*sorted((ROWS / "published").glob("*.csv")), ROWS / "runs-2026.csv", ROWS / "playbook.csv")
BEFORE = ROWS / "plan-memory-before.json"
PAGE = ROOT / "docs/measurements/plan-memory.md"

IN_USE = ("simumax-b200", "vocabpar")
"""Sources that print what torch had in use. Of the others, it is what torch had reserved, or all of the GPU's."""
WHOLE = ("ml-engineering", "ms-swift", "primus", "trl")
"""Sources that print all that the GPU had given away."""
FIRST_RANK = ("playbook",)
"""Sources that print the figure of rank 0, on the first stage. Of the others, it is that of the fullest rank."""
SEEN = ("mlperf",)
"""Sources whose peaks were held back at first and have been looked at since: they count as looked at."""

WORDS = ("fits", "tight", "doubtful", "does not fit")
Figures = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Run:
    """A published run: its source, whether it was held back, the peak in GiB if it was printed, whether it ran out of
    memory, and what is predicted: the word, and the figure that compares with the peak."""

    name: str
    source: str
    is_held_back: bool
    peak_gib: float | None
    ran_out: bool
    fit: str
    gib: float


def read_runs() -> Iterator[Run]:
    """Yield every run that can be priced and says something about memory: that it ran, or that it did not."""
    for path in FILES:
        for row in read_rows(path)[1]:
            setup = setup_of(row)
            source = path.stem if path.parent.name == "published" else row.text("source")
            if isinstance(setup, str) or not row.is_scored("mem"):
                continue
            gpu = model_named(row.text("gpu"), setup.ranks_per_node)
            if gpu and (row.seconds or row.memory_gib or row.flag("oom")):
                price = price_setup(setup, expected_on(gpu))
                yield Run(
                    row.name,
                    source,
                    is_held_back(row, source),
                    row.memory_gib,
                    row.flag("oom"),
                    price.fit,
                    _comparable(price, source),
                )


def is_held_back(row: MeasuredRow, source: str) -> bool:
    if source in SEEN:
        return False
    key = f"{source} {row.text('nlayers')}x{row.text('nhidden')} {row.text('seq')}"
    return hashlib.sha256((row.section if source == "playbook" else key).encode()).digest()[0] % 3 == 0


def _comparable(price: Price, source: str) -> float:
    """Return the predicted figure that is the same as the printed one."""
    process = price.first_stage.process_gib
    if source in IN_USE:
        return price.need_gib - process
    if source in FIRST_RANK:
        return price.first_stage.predicted_gib - process
    return price.memory_gib - (0.0 if source in WHOLE else process)


def peaks(runs: Sequence[Run]) -> list[float]:
    """Return the count, the median of predicted over printed, and of the relative errors mean, median and 90 %."""
    ratios = [run.gib / run.peak_gib for run in runs if run.peak_gib]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    if not errors:
        return [0.0]
    return [
        len(errors),
        median(ratios),
        100 * sum(errors) / len(errors),
        100 * median(errors),
        100 * errors[min(len(errors) - 1, int(0.9 * len(errors)))],
    ]


def words(runs: Sequence[Run], *, ran_out: bool) -> list[float]:
    """Return how many runs got each word."""
    return [sum(run.fit == word for run in runs if run.ran_out is ran_out) for word in WORDS]


def figures(runs: Sequence[Run]) -> Figures:
    """Return the figures of each source and of all, by part."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        part = "held back" if run.is_held_back else "looked at"
        groups[f"{run.source}, {part}"].append(run)
        groups[f"all, {part}"].append(run)
        if run.source != "playbook":
            groups[f"all but the playbook, {part}"].append(run)
    return {
        name: {"peaks": peaks(group), "ran": words(group, ran_out=False), "oom": words(group, ran_out=True)}
        for name, group in sorted(groups.items())
    }


def table(now: Figures, before: Figures) -> Iterator[str]:
    yield (
        "| peaks: source, part | peaks | predicted / printed, median | error mean / median / p90, % | before: median, "
        "error mean, % |"
    )
    yield "|---|---|---|---|---|"
    for name, found in now.items():
        if found["peaks"][0]:
            count, ratio, *errors = found["peaks"]
            old = before.get(name, {}).get("peaks", [0.0])
            three = " / ".join(f"{error:.1f}" for error in errors)
            then = f"{old[1]:.2f}, {old[2]:.1f}" if old[0] else "not priced"
            yield f"| {name} | {count:.0f} | {ratio:.2f} | {three} | {then} |"
    yield ""
    yield "| runs that had enough memory: source, part | runs | fits, tight, doubtful, does not fit | before: refused |"
    yield "|---|---|---|---|"
    yield from _lines(now, before, "ran")
    yield ""
    yield "| runs that ran out of memory: source, part | runs | fits, tight, doubtful, does not fit | before: caught |"
    yield "|---|---|---|---|"
    yield from _lines(now, before, "oom")


def _lines(now: Figures, before: Figures, kind: str) -> Iterator[str]:
    for name, found in now.items():
        total = sum(found[kind])
        if total:
            share = f"{100 * found[kind][-1] / total:.1f} %"
            counts = ", ".join(f"{count:.0f}" for count in found[kind])
            old = before.get(name, {}).get(kind, [])
            then = f"{old[-1]:.0f} of {sum(old):.0f}" if sum(old) else "not priced"
            yield f"| {name} | {total:.0f} | {counts} ({share}) | {then} |"


def rows_of(source: str) -> Iterator[str]:
    """Yield the rows of one source that were looked at: never the others."""
    for run in read_runs():
        if run.source == source and not run.is_held_back:
            yield f"{run.gib:6.1f} {run.peak_gib or 0:6.1f} {run.fit:12} {'OOM' if run.ran_out else '   '} {run.name}"


def main() -> None:
    if "--source" in sys.argv:
        print("\n".join(rows_of(sys.argv[sys.argv.index("--source") + 1])))
        return
    found = figures(list(read_runs()))
    if "--keep" in sys.argv:
        BEFORE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    page_part.show(PAGE, "memory", "\n".join(table(found, json.loads(BEFORE.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
