"""Attacks a real run of `bsl train` with `survive` by name, and holds the outcome against what the case expected.

    python benchmarks/recovery_attacks.py [NAMES] [--cases known|other] [--folder DIR] [--page PAGE]

Each attack is one small run of 4 gloo ranks that is hurt once started: every loss, the last checkpoint (`bsl
diff-weights`), exit.json, `bsl status --json` and the records of the controller are compared with the undisturbed run
and with what the case says must become of it. `recovering/attack.py` explains how to add one. Without names, all cases
that the folder has no row of are run; with `--page`, the rows of all cases are written, those without one as not run.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from ranks import draw_corpus
from recovering.attack import Attack, CannotRun
from recovering.attack_judged import Row, judge
from recovering.attacked_run import StartedRun
from recovering.injured_run import run_undisturbed, write_run_file

from bigsci_launch.runs.layout import RunDir


class Attacked:
    """The folder of all attacked runs, and the rows about them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows = folder / "rows.jsonl"
        with self._alone():
            if not (folder / "corpus.idx").exists():
                draw_corpus(folder / "corpus")

    def rows(self) -> dict[str, Row]:
        """Return the newest row of each attack that was made in this folder."""
        lines = self._rows.read_text().splitlines() if self._rows.exists() else []
        return {document["name"]: Row.of_document(document) for document in map(json.loads, lines)}

    def attack(self, attack: Attack) -> Row:
        """Make an attack, and keep its row."""
        row = self._attacked(attack)
        with self._rows.open("a") as stream:
            stream.write(json.dumps(asdict(row)) + "\n")
        return row

    def _attacked(self, attack: Attack) -> Row:
        began = time.monotonic()
        plain = Row(attack.name, attack.group, attack.what, str(attack.expected))
        started = self._prepared(attack)
        try:
            reference = self._reference(attack)
            self._injured(attack, started)
            return judge(attack, started, reference, round(time.monotonic() - began, 1))
        except CannotRun as error:
            return Row(**{**asdict(plain), "could_not": str(error)})
        except (Exception, SystemExit):  # a case that is wrong must not end the others
            return Row(**{**asdict(plain), "outcome": "no verdict", "problems": (traceback.format_exc()[-900:],)})
        finally:
            started.end_all()

    def _injured(self, attack: Attack, started: StartedRun) -> None:
        if attack.starts:
            started.start()
        try:
            attack.injure(started)
        except SystemError as error:  # the moment did not come; what became of the run is judged all the same
            started.problems.append(str(error))
        if started.is_running:
            started.wait()

    def _prepared(self, attack: Attack) -> StartedRun:
        """Write the run file; what an earlier run of this attack has left is removed."""
        run = RunDir(self._folder / "runs" / attack.name)
        shutil.rmtree(run.path, ignore_errors=True)
        injuries = self._folder / "injuries" / attack.name
        shutil.rmtree(injuries, ignore_errors=True)
        path = self._write(attack.name, attack, {} if attack.survive else None, attack.run_file())
        path.with_suffix(".out").unlink(missing_ok=True)
        return StartedRun(attack, path, run, injuries)

    def _reference(self, attack: Attack) -> RunDir:
        """Return the undisturbed run of the settings of this attack; only one process makes it."""
        more = attack.reference_file()
        digest = hashlib.sha256(json.dumps([more, attack.layout.name], sort_keys=True).encode()).hexdigest()[:8]
        name = f"sound-{attack.layout.name}-{digest}"
        run = RunDir(self._folder / "runs" / name)
        with self._alone():
            if not (run.path / "sound").exists():
                shutil.rmtree(run.path, ignore_errors=True)
                run_undisturbed(self._write(name, attack, None, more), run)
                (run.path / "sound").touch()
        return run

    def _write(self, name: str, attack: Attack, survive: dict[str, Any] | None, more: dict[str, Any]) -> Path:
        return write_run_file(self._folder, name, attack.layout, self._folder / "corpus", survive, more)

    def _alone(self) -> _Alone:
        return _Alone(self._folder / "lock")


class _Alone:
    """Only one process of this benchmark is in here."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._stream = self._path.open("w")
        fcntl.flock(self._stream, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="these attacks, again if the folder has rows of them")
    parser.add_argument("--cases", choices=("known", "other"), default="known")
    parser.add_argument("--folder", type=Path, help="keep the runs here, and continue with what is there")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    options = parser.parse_args()
    attacks: Sequence[Attack] = import_module(f"recovering.attacks_{options.cases}").ATTACKS
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="attacks-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    attacked = Attacked(folder)
    for attack in chosen(attacks, options.names, attacked.rows()):
        print(json.dumps(asdict(attacked.attack(attack))), flush=True)
    rows = attacked.rows()
    text = table(attacks, rows)
    if options.page:
        write_page(options.page, options.cases, text)
    print(text)
    sys.exit(any(rows[each.name].problems for each in attacks if each.name in rows))


def chosen(attacks: Sequence[Attack], names: Sequence[str], rows: dict[str, Row]) -> list[Attack]:
    """Return the attacks of these names, in that order; without names, those that have no row.

    Raises:
        SystemExit: there is no attack of such a name.
    """
    if unknown := set(names) - {each.name for each in attacks}:
        sys.exit(
            f"no attack is called {', '.join(sorted(unknown))}; there are {', '.join(each.name for each in attacks)}"
        )
    by_name = {each.name: each for each in attacks}
    return [by_name[name] for name in names or [name for name in by_name if name not in rows]]


def table(attacks: Sequence[Attack], rows: dict[str, Row]) -> str:
    """Return the table of all attacks, those that were not made too."""
    lines = ["| attack | expected | outcome | what the run says | verdict |", "|---|---|---|---|---|"]
    for each in attacks:
        row = rows.get(each.name) or Row(each.name, each.group, each.what, str(each.expected), could_not="not run yet")
        outcome = "not run" if row.could_not else "; ".join((row.outcome, *row.notes))
        verdict = row.could_not or "; ".join(row.problems) or "as expected"
        cells = (each.what, str(each.expected), outcome, row.said or "-", verdict)
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def write_page(path: Path, cases: str, text: str) -> None:
    begin, end = f"<!-- attacks {cases} -->", f"<!-- /attacks {cases} -->"
    page = path.read_text()
    before, rest = page.split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


if __name__ == "__main__":
    main()
