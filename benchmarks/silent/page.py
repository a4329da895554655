"""The page of all injected defects, and the same as JSON. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from silent.case import Case, Row

TITLES = {
    "data": "Data",
    "state": "State of the optimizer and the weights",
    "nan": "Values that are not finite",
    "gradients": "Gradients",
    "restart": "Restarts",
    "heldout": "Held out",
    "healthy": "Undisturbed runs",
}
NOTES = {
    "heldout": """These defects were declared by a person who had not read the checking code, before any of them was
run. The column "before" is the first measurement, of a version that had not been changed for them; the guards were
mended after it, so the rows of now measure nothing unseen. Their check is open: the cause is judged by ranks, tensor
and what is said. Three were run a second time, because their injection had to be repaired: `gradients-kept-dp` and
`tie-lost` had no effect at first, and `schedule-late-dp` acted a step early.""",
}
HEAD = """<!-- Made by `python benchmarks/silent_defects.py --before benchmarks/rows/silent-defects-before.json
benchmarks/rows/silent-defects-heldout.json --page docs/measurements/silent-defects.md`. -->

# Injected defects of training, and what `bsl train` says of each

A tiny GPT is trained on two or four ranks, and something is broken from outside the package: a patch of DeepSpeed or
torch in the running ranks, or a change of files between two attempts. `bsl train` does not know of it. Unless the row
says otherwise, the defect begins at step {at} of {steps}, checks run in every step (`guards: {{interval: 1}}`), and the
run saves after every {every} steps. A restart goes through all that `bsl submit` checks; then the ranks resume after
step {half}. What happened is judged by these rules:

- **in its step**, **N late**: all ranks stopped with an error, `before a save` or `after` one that
  has the defect in it.
- **refused**: `bsl submit` started nothing. **refused at load**: the ranks trained no step.
- **named**: it is said, and the run continues, as it should for a setting that may have been changed on purpose.
- **silent**: nothing was said. **crashed**, **hung**: an end that is not one of those.

**Cause** is `right` if what is said first has the expected check, tensor and words, and blames no rank but the culprit.
**Saved** is whether a checkpoint that has the defect in it became `latest`. **Loss** is the largest difference from the
same run without the defect, up to its end. **Before** is the same for the version in which these defects were first
injected. A row counts as right if it has all of that: found before a save, within a step if every step is checked,
with its cause; or named; or, for an undisturbed run, nothing at all.
"""


def page(cases: Sequence[Case], rows: Mapping[str, Row], before: Mapping[str, Row], numbers: Mapping[str, int]) -> str:
    """Return the page, with the rows of `before` as a column."""
    parts = [HEAD.format(**numbers), "\n".join(counts(cases, rows, before)), *not_run(cases, rows)]
    for group, title in TITLES.items():
        chosen = [case for case in cases if case.group == group and case.name in rows]
        if chosen:
            note = [NOTES[group]] if group in NOTES else []
            parts.append("\n\n".join([f"## {title}", *note, "\n".join(table(chosen, rows, before))]))
    parts.append("## What was said\n\n" + "\n".join(said(cases, rows)))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def not_run(cases: Sequence[Case], rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield a sentence that names the cases without a row: nothing is known of them."""
    missing = [f"`{case.name}`" for case in cases if case.name not in rows]
    if missing:
        names, total = ", ".join(missing), len(cases)
        yield f"**{len(missing)} of {total} cases have not been run**, so nothing is known of them: {names}."


def counts(cases: Sequence[Case], rows: Mapping[str, Row], before: Mapping[str, Row]) -> Iterator[str]:
    """Yield the counts, now and before."""
    yield from ("| | defects | found and named | silent | wrong became `latest` | undisturbed runs | false alarms |",)
    yield "|" + "---|" * 7
    apart = [case for case in cases if case.group == "heldout"]
    others = [case for case in cases if case.group != "heldout"]
    for title, chosen, some in (
        ("before", others, before),
        ("now", others, rows),
        ("held out, first measured", apart, before),
        ("the same, now", apart, rows),
    ):
        if any(case.name in some for case in chosen):
            yield f"| {title} | " + " | ".join(map(str, count(chosen, some))) + " |"


def count(cases: Sequence[Case], rows: Mapping[str, Row]) -> tuple[int, ...]:
    """Return how many defects there are, are right, are silent, have tainted `latest`; healthy runs, false alarms."""
    judged = [(case, rows[case.name]) for case in cases if case.name in rows]
    wrong = [(case, row) for case, row in judged if case.truth.wanted in ("stop", "name")]
    healthy = [row for case, row in judged if case.group == "healthy"]
    verdicts = Counter(row.verdict for _, row in wrong)
    return (
        len(wrong),
        sum(row.is_right for _, row in wrong),
        verdicts["silent"],
        sum(row.tainted for _, row in wrong),
        len(healthy),
        sum(not row.is_right for row in healthy),
    )


def table(cases: Sequence[Case], rows: Mapping[str, Row], before: Mapping[str, Row]) -> Iterator[str]:
    """Yield a table of cases."""
    yield "| | defect | ranks | what happened | cause | saved | loss | right | before |"
    yield "|" + "---|" * 9
    for case in cases:
        row, old = rows[case.name], before.get(case.name)
        what = f"{case.what} ({case.truth.why})" if case.truth.why else case.what
        where = " ".join(case.shape.replace("=", " ").split(","))
        shown = (
            row.verdict,
            row.cause,
            "yes" if row.tainted else "",
            jump(row.jump),
            "yes" if row.is_right else "**no**",
        )
        yield f"| `{case.name}` | {what} | {where} | " + " | ".join(shown) + f" | {old.verdict if old else ''} |"


def jump(value: float | None) -> str:
    if value is None:
        return ""
    return "nan" if math.isnan(value) else f"{value:+.1e}"


def said(cases: Sequence[Case], rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield what was said of each defect, in the words of the first finding."""
    for case in cases:
        if case.name in rows and rows[case.name].said:
            yield f"- `{case.name}`: {rows[case.name].said}"
