"""The page of all failures, and the same as JSON. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from failing.case import LAUNCHERS, Ended, Grades, LaunchFailure, Truth

SCHEMA_VERSION = 1
QUOTE_LENGTH = 200
FOLDER = re.compile(r"/tmp/bsl-[\w-]+")
WAYS = (("bsl why", "why"), ("exit code", "exit_code"), ("last traceback", "traceback"))
HEAD = """<!-- Made by `python benchmarks/launch_failures.py --page docs/measurements/launch-failures.md`. -->

# Failures under five launchers, and what `bsl why` says of them

Each row is a batch job on a real Slurm with 16 nodes on one machine, written as for any cluster and submitted with
`sbatch`, without `bsl`. Its ranks fail in a real way: they raise, are killed, fill a disk, hang, lose their node. The
rank that fails first writes down who it is, where `bsl` does not look. Then `bsl why JOBID` is asked, or `bsl why
FOLDER` where ranks print into files of their own, and two other ways to look are tried on the same job:

- **exit code**: the state and the exit code that Slurm has.
- **last traceback**: the last one in the output, or in the newest file with one; the label in front of it is the rank.

`right` is said and true, `unknown` is not said, `wrong` is said and false: an innocent rank or node, or another kind.
Where a job is ended from outside, nothing is to be blamed. Where a node is lost, its name counts. A rank is also known
by its node and local rank. GPUs are missing, and all nodes share two cores.
"""


def page(rows: Sequence[Ended], first_run: str) -> str:
    """Return the page."""
    parts = [HEAD, first_run, summary(rows)]
    parts += [
        f"## {name}\n\n{table(of)}" for name in LAUNCHERS if (of := [r for r in rows if r.failure.launcher == name])
    ]
    bad = [row for row in rows if row.problem or row.why.verdict != "right"]
    if bad:
        parts.append("## What is not right\n\n" + "\n".join(fault_line(row) for row in bad))
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def summary(rows: Sequence[Ended]) -> str:
    """Return how often each way names the first failure, for each launcher."""
    made = [row for row in rows if not row.problem]
    lines = [row_text(["first failing rank", *LAUNCHERS, "all", "wrong node", "kind right"]), row_text(["---"] * 9)]
    for title, way in WAYS:
        cells = [counts(grades_of(made, way, name)) for name in LAUNCHERS]
        every = grades_of(made, way)
        nodes = sum(each.node == "wrong" for each in every)
        kinds = sum(each.kind == "right" for each in every)
        lines.append(row_text([title, *cells, f"**{counts(every)}**", str(nodes), f"{kinds} of {len(every)}"]))
    missing = len(rows) - len(made)
    note = f"\n\n{missing} could not be made." if missing else ""
    return "\n".join(lines) + "\n\nright / unknown / wrong" + note


def grades_of(rows: Sequence[Ended], way: str, launcher: str | None = None) -> list[Grades]:
    return [getattr(row, way) for row in rows if launcher in (None, row.failure.launcher)]


def counts(grades: Sequence[Grades]) -> str:
    counted = Counter(each.rank for each in grades)
    return " / ".join(str(counted[name]) for name in ("right", "unknown", "wrong"))


def table(rows: Sequence[Ended]) -> str:
    lines = [
        row_text(["failure", "first, in truth", "`bsl why`: kind", "rank", "node", "exit code: kind", "last traceback"])
    ]
    lines.append(row_text(["---"] * 7))
    for row in rows:
        if row.problem:
            lines.append(row_text([row.failure.what, "", "not made", "", "", "", ""]))
            continue
        grades = (row.why.kind, row.why.rank, row.why.node, f"{row.state}: {row.exit_code.kind}", row.traceback.rank)
        lines.append(row_text([row.failure.what, truth_text(row), *grades]))
    return "\n".join(lines)


def truth_text(row: Ended) -> str:
    truth = row.truth
    if row.failure.whose == "rank":
        return f"rank {truth.ranks[0]} on {truth.node}" if truth.ranks else "-"
    return f"node {truth.node}" if truth.node else "none"


def row_text(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def fault_line(row: Ended) -> str:
    name = f"- {row.failure.launcher}, {row.failure.what}"
    if row.problem:
        return f"{name}: not made: {shortened(row.problem)}"
    said = row.said.get("sentence", ""), row.said.get("first_failure", {}).get("text", "")
    return f"{name}: true is {truth_text(row)}; it says `{shortened(': '.join(said))}`"


def shortened(text: str) -> str:
    flat = FOLDER.sub("DIR", " ".join(text.split())).replace("`", "'")
    return flat if len(flat) <= QUOTE_LENGTH else flat[:QUOTE_LENGTH] + " ..."


def document(rows: Sequence[Ended]) -> dict[str, Any]:
    """Return the JSON document."""
    return {"schema_version": SCHEMA_VERSION, "rows": [document_of(row) for row in rows]}


def document_of(row: Ended) -> dict[str, Any]:
    fields = asdict(row)
    fields["failure"] = {"launcher": row.failure.launcher, "name": row.failure.name}
    return fields


def parse_row(failure: LaunchFailure, row: dict[str, Any]) -> Ended:
    """Return the row of a failure from a document."""
    grades = {way: Grades(**row[way]) for _, way in WAYS}
    truth = Truth(**{**row["truth"], "ranks": tuple(row["truth"]["ranks"])})
    return Ended(failure, truth, **grades, **{k: row[k] for k in ("said", "state", "quoted", "problem")})
