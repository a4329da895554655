"""The page of all injections, and the same as JSON. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from injected.case import COLUMNS, Fault, Injection, Row

SCHEMA_VERSION = 1
WORDS_LENGTH = 300
FOLDER = re.compile(r"/tmp/bsl-[\w-]+")
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
HEAD = """<!-- Made by `python benchmarks/injections.py --page docs/measurements/injections.md`. -->

# Injected failures, and what `bsl` says of each

Every row is a failure that was made on a real Slurm on one machine: ranks that die or hang, nodes that lose power, a
full disk, a dead slurmctld, preemption. Then `bsl status` was asked as a user would ask, `bsl logs` too if it was
advised, and the answers were compared with what is true, which is known from how the failure was made:

- **exit status**: `exit.json` and Slurm have the one of the rank that failed first.
- **cause**: the state and the reason are right, and what explains it is said.
- **rank**, **node**: the culprit is named; where no rank is to blame, none is. An innocent one is always wrong.
- **next step**: the last line helps, and nothing in it would harm a healthy run or another one.

`right` is said and true, `unknown` is not said, `wrong` is said and false, or advised and harmful, and `-` does not
apply. A row is as good as its worst column. **Before** is the verdict on the version in which these failures were first
injected. NCCL needs GPUs: in its row, ranks print the words that it prints.
"""
TITLES = {"first": "The first 28, and a healthy run", "more": "More", "held-out": "Held out"}
HELD_OUT = """These were written, and what is true of them was declared, without looking at how `bsl` judges. **Measured
once before anything was changed, 9 of 12 were right.** Three were wrong: `slow-death` blamed a victim, `step-cancelled`
was called crashed, and `clock-jumps` named the wrong rank. They were mended after that, so the table below no longer
measures what `bsl` says of failures that it has never seen. (The first try of `rebooted` made no failure: it did not
find the processes of the node. It was corrected, and then measured once.)"""


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    parts = [HEAD, counts_text(rows)]
    for group, title in TITLES.items():
        chosen = [row for row in rows if row.injection.group == group]
        if chosen:
            words = f"{HELD_OUT}\n\n{counts_text(chosen)}\n\n" if group == "held-out" else ""
            parts.append(f"## {title}\n\n{words}{table(chosen)}")
    bad = [row for row in rows if row.verdict != "right"]
    if bad:
        parts.append("## What is not right\n\n" + "\n".join(line for row in bad for line in fault_lines(row)))
    parts.append("## What was said\n\n" + "\n".join(line for row in rows for line in said_lines(row)))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def counts_text(rows: Sequence[Row]) -> str:
    counted = Counter(row.verdict for row in rows)
    parts = [
        f"{counted[verdict]} {verdict}" for verdict in ("right", "unknown", "wrong", "not made") if counted[verdict]
    ]
    return f"Now, of {len(rows)} rows: {', '.join(parts)}."


def table(rows: Sequence[Row]) -> str:
    titles = ["injection", "name", "before", *COLUMNS, "now"]
    lines = [row_text(titles), row_text(["---"] * len(titles))]
    for row in rows:
        before = row.injection.before or "-"
        cells = [row.grades[column] if not row.problem else "" for column in COLUMNS]
        name = f"`{row.injection.name}`"
        lines.append(row_text([row.injection.what, name, before, *cells, f"**{row.verdict}**"]))
    return "\n".join(lines)


def row_text(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def fault_lines(row: Row) -> list[str]:
    if row.problem:
        return [f"- `{row.injection.name}` was not made: {shortened(row.problem)}"]
    return [f"- `{row.injection.name}`, {fault.column}, {fault.grade}: {shortened(fault.what)}" for fault in row.faults]


def said_lines(row: Row) -> list[str]:
    """Return a block with what `bsl status` said at the end about why; nothing if it was not asked."""
    text = UNPRINTABLE.sub("?", "\n".join(row.said))
    return [f"`{row.injection.name}`:\n\n```text\n{text}\n```\n"] if text else []


def shortened(text: str) -> str:
    flat = FOLDER.sub("DIR", " ".join(text.split()))
    return flat if len(flat) <= WORDS_LENGTH else flat[:WORDS_LENGTH] + " ..."


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the JSON document."""
    counted = Counter(row.verdict for row in rows)
    return {
        "schema_version": SCHEMA_VERSION,
        "counts": dict(counted),
        "rows": [
            {
                "name": row.injection.name,
                "what": row.injection.what,
                "is_own": row.injection.is_own,
                "is_held_out": row.injection.is_held_out,
                "before": row.injection.before or None,
                "now": row.verdict,
                "grades": row.grades,
                "faults": [{"column": f.column, "grade": f.grade, "what": f.what} for f in row.faults],
                "said": list(row.said),
                "problem": row.problem or None,
                "seconds": round(row.seconds, 1),
            }
            for row in rows
        ],
    }


def parse_row(injection: Injection, row: dict[str, Any]) -> Row:
    """Return the row of an injection from a document."""
    faults = tuple(Fault(fault["column"], fault["grade"], fault["what"]) for fault in row["faults"])
    return Row(injection, row["grades"], faults, tuple(row["said"]), row["seconds"], row["problem"] or "")
