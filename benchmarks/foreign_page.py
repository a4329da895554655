"""Writes docs/measurements/foreign-programs.md: what `bsl spy` said about programs that it was not built on.

    python benchmarks/foreign_page.py --table ROWS.jsonl... --held-out ROWS.jsonl --before ROWS.jsonl... --write

    python benchmarks/foreign_page.py --tuned ROWS.jsonl --kept ROWS.jsonl --recorded ROWS.jsonl --first ROWS.jsonl \\
        --looks ROWS.jsonl --write

ROWS are results of `benchmarks/foreign_hangs.py --rejudge`. Without --write, the page is printed. The second form
writes only the section on programs in which the many may be wrong (`foreign/cases_majority.py`), and leaves the rest
of the page as it is: --first are the answers of the engine before, --recorded those with torch's recorder, and
--looks are rows of the runs themselves, which have the seconds of each look.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from foreign.case import Truth  # noqa: E402
from foreign.cases_majority import TRAPS  # noqa: E402
from foreign.scoring import HARMFUL, OUTCOMES, Answer, figures  # noqa: E402

PAGE = HERE.parent / "docs" / "measurements" / "foreign-programs.md"
FIGURES = (
    ("state_right", "state right"),
    ("ranks_right", "ranks right, of hangs and crashes"),
    ("class_right", "exact class"),
    ("top1", "the first rank to look at is guilty"),
    ("top3", "one of the first three is"),
    ("unnamed", "called a hang or a crash, and no rank is accused"),
    ("astray", "called a hang or a crash, and neither an accused rank nor the first one to look at is guilty"),
    ("unpointed", "of hangs, no rank is accused or pointed at"),
)
Row = dict[str, Any]
SECTION = "## Where the many may be wrong"
MAJORITY = """Programs of `benchmarks/foreign/cases_majority.py`: torchrun, mp.spawn, accelerate, bash and launchers
of one's own, two to five ranks, on two cores. A quarter are traps: the odd rank is right and the many are wrong, two
are odd at once, or the one that is slow is healthy. Two thirds of the programs were looked at while the rules were
changed; the last third is chosen by a hash of the name. A rank that is alone in its collective is not accused: with
stacks alone, such hangs name nobody, and point at it first, then at one of the many. What the rank's own past shows
needs rings or `--flight-recorder=fork`: two finished rounds are a past.

The two thirds were looked at at a load of 20 to 90, and judged again here: *before* is the engine of the last series.
The last third was asked about once with this engine, at a load of 20 to 70. It is not unseen: the engine before had
been asked about it, and its answers were known. Of these programs, many-crash-loop did not reach its state this time,
and many-port was asked about 30 s after its launcher had started, 12 s before. many-fsdp-tower ends by itself on this
machine, and counts as a hang that was not named.

The goals are missed: the first pointer was to be right in 92 %, one of the first three in 97 %, and at most 15 % of
what is called a hang were to name nobody. From one look without a past, one rank against three looks as its mirror
does.

A version later, the hangs and crashes of the two thirds were asked about again, at a load that rose from 7 to 127;
38 of 39 were reached. No rank was accused wrongly. The programs that are well and the
last third were not run again. The last two rows count what is called a hang or a crash.

| | at once | 20 s, the recorder left out | 20 s, with the recorder |
|---|---|---|---|
| the first rank to look at is guilty | 29 of 38 | 30 of 38 | 35 of 38 |
| one of the first three is | 36 of 38 | 37 of 38 | 37 of 38 |
| the first is guilty, of the seven traps | 1 of 7 | 1 of 7 | 6 of 7 |
| no rank is accused | 14 of 19 | 24 of 33 | 14 of 32 |
| neither an accused rank nor the first to look at is guilty | 6 of 19 | 8 of 33 | 3 of 32 |
"""
INTRODUCTION = """# Programs that `bsl spy` was not built on

Every program in this table was written for it, without the package: as users of these frameworks write them, in their
own words, started by their own launchers. Some are healthy, some are slow, some hang; what is true is known by
construction. Each is asked about twice, at random moments: at once, and with `--settle`. A hang that has just begun
is called `waiting`, which counts as undecided here, although the rank to look at is named. Second
questions were asked with `--settle 20 --native`, those of an earlier series with `--settle 40`; one engine judged all.

`benchmarks/foreign_hangs.py` runs the table, `benchmarks/foreign_page.py` writes this page.
"""

HELD_OUT = """Written by another hand, run once after the engine was frozen, as it came out. What it showed to be wrong
was mended afterwards and not asked again.
"""


def read(paths: Sequence[Path]) -> list[Row]:
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [scored(row) for row in rows if row["outcome"] != "not scored"]


def scored(row: Row) -> Row:
    """Return a row, which may be an old one, with the figures as they are counted now."""
    truth, answer = row["truth"], row["answer"]
    if not answer or not row.get("figures"):
        return row
    sets = {name: frozenset(truth[name]) for name in ("culprits", "involved", "classes", "also")}
    told = {**answer, "hang_class": answer["class"], "suspects": tuple(answer["suspects"] or ())}
    told["look_first"] = tuple(answer["look_first"] or ())
    told.pop("class")
    return {**row, "figures": figures(Truth(state=truth["state"], pids={}, **sets), Answer(**told))}


def share(rows: Sequence[Row], name: str) -> str:
    found = [row["figures"][name] for row in rows if row.get("figures") and row["figures"][name] is not None]
    return f"{sum(found)} of {len(found)} ({sum(found) / len(found):.0%})" if found else "-"


def table(columns: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    counts = [Counter(row["outcome"] for row in rows) for _, rows in columns]
    lines = [f"| | {' | '.join(name for name, _ in columns)} |", f"|---|{'---|' * len(columns)}"]
    lines.append(f"| programs | {' | '.join(str(len({row['case'] for row in rows})) for _, rows in columns)} |")
    lines.append(f"| questions | {' | '.join(str(len(rows)) for _, rows in columns)} |")
    for outcome in OUTCOMES:
        if outcome in HARMFUL or (outcome != "not scored" and any(count[outcome] for count in counts)):
            lines.append(f"| {outcome} | {' | '.join(str(count[outcome]) for count in counts)} |")
    for name, words in FIGURES:
        lines.append(f"| {words} | {' | '.join(share(rows, name) for _, rows in columns)} |")
    return lines


def by_framework(rows: Sequence[Row]) -> list[str]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["framework"]].append(row)
    lines = [
        "| framework | programs | questions | right | undecided | no rank named | other |",
        "|---|---|---|---|---|---|---|",
    ]
    for framework, theirs in sorted(found.items()):
        counts = Counter(row["outcome"] for row in theirs)
        named = [counts[name] for name in ("right", "undecided", "no rank named")]
        cells = [len({row["case"] for row in theirs}), len(theirs), *named, len(theirs) - sum(named)]
        lines.append(f"| {framework} | {' | '.join(map(str, cells))} |")
    return lines


def exceptions(rows: Sequence[Row]) -> list[str]:
    """Every answer that is neither right nor undecided."""
    lines = ["| program | truth | answer | outcome |", "|---|---|---|---|"]
    for row in rows:
        if row["outcome"] not in ("right", "undecided"):
            truth, answer = row["truth"], row["answer"] or {}
            guilty = ",".join(map(str, truth["culprits"] or truth["involved"]))
            first = ",".join(map(str, answer.get("look_first", ())[:3]))
            said = (
                f"{answer.get('state')} {answer.get('class') or ''}, accused {answer.get('suspects')}, look at {first}"
            )
            lines.append(f"| {row['case']} | {truth['state']} {guilty} | {said} | {row['outcome']} |")
    return lines


def majority(options: argparse.Namespace) -> str:
    """The section on programs in which the many may be wrong."""
    named = (
        ("two thirds, before", options.first), ("two thirds", options.tuned), ("the last third", options.kept),
        ("the last third, second look, with the recorder", options.recorded),
    )  # fmt: skip
    columns = [(name, read(paths)) for name, paths in named if paths]
    columns = [(name, [row for row in rows if row["ask"] == 2] if "second" in name else rows) for name, rows in columns]
    lines = [SECTION, "", MAJORITY, *table(columns), "", "Of these, the traps:", ""]
    lines += [*table([(name, [row for row in rows if row["case"] in TRAPS]) for name, rows in columns]), ""]
    looks = [json.loads(line) for path in options.looks for line in path.read_text().splitlines()]
    for number, words in ((1, "at once"), (2, "with 20 s, native frames and the recorder")):
        seconds = [row["seconds"] for row in looks if row["ask"] == number]
        if seconds:
            lines.append(f"A look {words} took {median(seconds):.1f} s (median), {max(seconds):.1f} s at most.")
    return "\n".join([*lines, "", *exceptions([row for _, rows in columns[1:3] for row in rows]), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--table", "--held-out", "--before", "--tuned", "--kept", "--recorded", "--first", "--looks"):
        parser.add_argument(name, nargs="*", type=Path, default=[])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.tuned:
        text = PAGE.read_text(encoding="utf-8").partition(SECTION)[0] + majority(options)
        PAGE.write_text(text, encoding="utf-8") if options.write else print(text)
        return
    rows, held_out, before = read(options.table), read(options.held_out), read(options.before)
    first, second = ([row for row in rows if row["ask"] == number] for number in (1, 2))
    columns = [("the engine before", before), ("all", rows), ("at once", first), ("20 to 40 s", second)]
    lines = [INTRODUCTION, "## The table\n", *table([each for each in columns if each[1]]), ""]
    lines += ["## By framework\n", *by_framework(rows), "", "## Neither right nor undecided\n", *exceptions(rows), ""]
    if held_out:
        lines += ["## Held out\n", HELD_OUT]
        first, second = ([row for row in held_out if row["ask"] == number] for number in (1, 2))
        lines += [*table([("all", held_out), ("at once", first), ("20 s", second)]), "", *exceptions(held_out), ""]
    text = "\n".join(lines)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
