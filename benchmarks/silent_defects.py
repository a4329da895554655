"""Injects defects into `bsl train` from outside the package, and judges what it says of each.

    python benchmarks/silent_defects.py --json rows.json --page docs/measurements/silent-defects.md
    python benchmarks/silent_defects.py --only "data/|/x8" --keep FOLDER

A tiny GPT on 2 or 4 ranks of this machine (gloo, CPU). Many attempts are trained in turn on the same ranks. Each
declares what is true of it (`silent/cases_*.py`); verdicts come from the records of the run alone (`silent/judge.py`).
`--before FILE...` shows the rows of an earlier `--json` as a column.

Exits with 1 if a row is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from silent import cases_heldout, cases_restart, cases_steps
from silent.case import AT, SAVE_EVERY, STEPS, Case, Row
from silent.cases_restart import HALF
from silent.field import Field, Made, train
from silent.judge import judge, look
from silent.page import count, page

from bigsci_launch.runs.layout import AttemptDir

CASES = (*cases_steps.CASES, *cases_restart.CASES, *cases_heldout.CASES)
NUMBERS = {"at": AT, "steps": STEPS, "every": SAVE_EVERY, "half": HALF}


def reference_key(case: Case) -> str:
    """Return what two cases share that have the same run without their defects."""
    sections = {key: value for key, value in case.sections.items() if key not in ("guards", "checkpoint", "data")}
    return f"base {case.base}" if case.base else json.dumps([case.shape, sections], sort_keys=True)


def references(cases: Sequence[Case]) -> dict[str, Case]:
    """Return one case by key of reference, for those that are compared with one."""
    return {reference_key(case): case for case in reversed(cases) if case.group != "healthy"}


def run_all(field: Field, cases: Sequence[Case]) -> dict[str, Row]:
    """Run all cases and return their rows by name."""
    needed = references(cases)
    bases = sorted({case.base for case in cases if case.base} | ({"dp2-other-seed"} if any_edit(cases) else set()))
    plain = {key: case for key, case in needed.items() if not case.base}
    first = {case.name: field.first(case) for case in cases if not case.base}
    known = {key: field.first(case, is_reference=True) for key, case in plain.items()}
    logs = field.folder / "logs"
    train(attempts([*map(field.base, bases), *known.values(), *first.values()]), logs)
    known |= {key: field.second(case, is_reference=True) for key, case in needed.items() if case.base}
    second = {case.name: field.second(case) for case in cases if case.base or case.group == "healthy"}
    train(attempts([*(known[key] for key in needed if key not in plain), *second.values()]), logs)
    rows = {}
    for case in cases:
        reference = known.get(reference_key(case))
        printed = reference.printed.splitlines() if reference else []
        halves = [each[case.name] for each in (first, second) if case.name in each]
        seen = [look(case, made, reference.attempt if reference else None, printed) for made in halves]
        judged = [judge(case, each) for each in seen]
        rows[case.name] = next((row for row in judged if not row.is_right), judged[-1])
        print(
            f"{'  ' if rows[case.name].is_right else '! '}{case.name}: {rows[case.name].verdict}, cause "
            f"{rows[case.name].cause}: {rows[case.name].said[:150]}",
            flush=True,
        )
    return rows


def any_edit(cases: Sequence[Case]) -> bool:
    return any(case.edit == "another run's" for case in cases)


def attempts(made: Sequence[Made]) -> list[AttemptDir]:
    return [each.attempt for each in made if each.attempt is not None]


def read_rows(paths: Sequence[Path]) -> Mapping[str, Row]:
    """Return the rows of files of an earlier `--json`."""
    return {name: Row(**row) for path in paths for name, row in json.loads(path.read_text())["rows"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression: run the cases whose `group/name` it finds")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--page", type=Path, help="write the page to this file")
    parser.add_argument("--before", type=Path, nargs="+", help="files of an earlier --json, shown as a column")
    parser.add_argument(
        "--rest", type=Path, help="an earlier --json: its rows stand for the cases that are not run now"
    )
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    cases = [case for case in CASES if re.search(options.only, f"{case.group}/{case.name}")]
    if options.list:
        print(*(f"{case.group:10} {case.name:28} {case.shape:10} {case.what}" for case in cases), sep="\n")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        rows = {**read_rows([options.rest] if options.rest else []), **run_all(Field(folder), cases)}
    if options.json:
        options.json.write_text(
            json.dumps({"rows": {name: row.as_dict() for name, row in rows.items()}}, indent=1) + "\n"
        )
    if options.page:
        options.page.write_text(page(CASES, rows, read_rows(options.before or []), NUMBERS))
    print("defects, right, silent, tainted, undisturbed, false alarms:", *count(CASES, rows))
    sys.exit(any(not row.is_right for row in rows.values()))


if __name__ == "__main__":
    main()
