"""Measures what `bsl diff-weights` does with checkpoints in every format.

    python benchmarks/weights_formats.py --page docs/measurements/weights-formats.md

It writes one small model in each format, with one bit flipped, and in files that are cut otherwise; then it damages
each file in turn. Folders of libraries that the project does not use come from `tests/unit/weights/foreign`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner
from weights_writers import ROWS, Row

from bigsci_launch.cli.main import bsl

# Files that say what a model is or where it is, not what its weights are.
ABOUT = re.compile(r"(?:config|generation_config|adapter_config)\.json|README.*|.*\.index\.json")
INTRODUCTION = """\
Each row is a small model in one format, written by the library that is named, or by a stand-in with the same files.

- *reads*: compared with itself, saved again; the answer is "equal", exit code 0, and nothing is left out;
- *one flipped bit*: one bit of one element of one tensor is flipped; the answer names the tensor, exit code 1;
- *cut otherwise*: the same model in other files is equal;
- *cut short*: each file in turn is cut to three fifths of its size, and to nothing; the answer names it, exit code 4;
- *a file missing*: each file in turn is removed; never "equal". If an index or metadata requires the file, it is named
  (exit code 4); otherwise the entries that it had are (exit code 1).

`config.json` and shard indexes are left out of the last two: indexes are checked against the shards."""
COLUMNS = ("format", "reads", "one flipped bit", "cut otherwise", "cut short", "a file missing")


@dataclass(frozen=True)
class Cell:
    """A cell of the table: `yes`, `no` or `-`, and why."""

    text: str
    why: str = ""


YES = Cell("yes")


@dataclass(frozen=True)
class Reply:
    """The output of one comparison."""

    code: int
    text: str

    @property
    def last(self) -> str:
        """What it says when something is wrong: its last line."""
        return self.text.strip().splitlines()[-1] if self.text.strip() else "no output"


def compare(a: Path, b: Path) -> Reply:
    """Run `bsl diff-weights` in this process."""
    result = CliRunner().invoke(bsl, ["diff-weights", str(a), str(b)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return Reply(-1, f"{type(result.exception).__name__}: {result.exception}")
    return Reply(result.exit_code, result.output)


def reads(row: Row, whole: Path, folder: Path) -> Cell:
    reply = compare(whole, row.write(folder, False))
    if reply.code == 0 and "not compared" not in reply.text:
        return YES
    return Cell("no", f"exit code {reply.code}: {reply.last}")


def names_a_bit(row: Row, whole: Path, folder: Path) -> Cell:
    reply = compare(whole, row.write(folder, True))
    if reply.code == 1 and row.named in reply.text:
        return YES
    return Cell("no", f"exit code {reply.code}: {reply.last}")


def is_equal_otherwise(row: Row, whole: Path, folder: Path) -> Cell:
    if isinstance(row.otherwise, str):
        return Cell("-", row.otherwise)
    reply = compare(whole, row.otherwise(folder, False))
    if reply.code != 0:
        return Cell("no", f"exit code {reply.code}: {reply.last}")
    reply = compare(whole, row.otherwise(folder / "changed", True))
    return YES if reply.code == 1 else Cell("no", f"with one bit flipped, exit code {reply.code}: {reply.last}")


def names_what_is_cut(row: Row, whole: Path, folder: Path) -> Cell:
    for number, name in enumerate(files_of(whole)):
        for share in (0.6, 0.0):
            cut, file = copied(whole, name, folder / f"{number}-{share}")
            with file.open("r+b") as stream:
                stream.truncate(int(file.stat().st_size * share))
            reply = compare(whole, cut)
            if reply.code != 4 or file.name not in reply.text:
                return Cell("no", f"{name} cut to {share:.0%}: exit code {reply.code}: {reply.last}")
    return YES


def notices_what_is_missing(row: Row, whole: Path, folder: Path) -> Cell:
    names = files_of(whole)
    if len(names) < 2:
        return Cell("-", "it is one file")
    for number, name in enumerate(names):
        lacking, file = copied(whole, name, folder / str(number))
        file.unlink()
        reply = compare(whole, lacking)
        if reply.code not in (1, 4):
            return Cell("no", f"without {name}: exit code {reply.code}: {reply.last}")
    return YES


def files_of(path: Path) -> list[str]:
    """Return the files of a checkpoint that are not about the model only, relative to its path; "" for a file."""
    if path.is_file():
        return [""]
    found = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return sorted(name for name in found if not ABOUT.fullmatch(Path(name).name))


def copied(path: Path, name: str, folder: Path) -> tuple[Path, Path]:
    """Return a copy of a checkpoint, and one file of it."""
    folder.mkdir(parents=True)
    target = folder / path.name
    if path.is_file():
        shutil.copy(path, target)
        return target, target
    shutil.copytree(path, target)
    return target, target / name


TRIALS: tuple[Callable[[Row, Path, Path], Cell], ...] = (
    reads,
    names_a_bit,
    is_equal_otherwise,
    names_what_is_cut,
    notices_what_is_missing,
)


def measured(row: Row, folder: Path) -> list[Cell]:
    """Return the cells of one row."""
    whole = row.write(folder / "whole", False)
    cells = []
    for trial in TRIALS:
        place = folder / trial.__name__
        try:
            cells.append(trial(row, whole, place))
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return cells


def page(rows: Sequence[tuple[Row, list[Cell]]]) -> str:
    """Return the page: the table, and why a cell is not `yes`."""
    notes: dict[str, int] = {}
    lines = [
        "<!-- Made by `python benchmarks/weights_formats.py --page docs/measurements/weights-formats.md`. -->",
        "",
        "# Which formats are compared",
        "",
        INTRODUCTION,
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---|" * len(COLUMNS),
    ]
    for row, cells in rows:
        marked = (
            f"{cell.text} ({notes.setdefault(cell.why, len(notes) + 1)})" if cell.why else cell.text for cell in cells
        )
        lines.append(f"| {row.name} | {' | '.join(marked)} |")
    lines += ["", *(f"{number}. {why}" for why, number in notes.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the page to this file")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only formats whose names contain one of these")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    root = Path(tempfile.mkdtemp(prefix="weights-formats-"))
    chosen = [row for row in ROWS if not arguments.only or any(text in row.name for text in arguments.only)]
    try:
        rows = [(row, measured(row, root / str(number))) for number, row in enumerate(chosen)]
    finally:
        shutil.rmtree(root)
    text = page(rows)
    print(text)
    if arguments.page:
        arguments.page.write_text(text)
    sys.exit(any(cell.text == "no" for _, cells in rows for cell in cells))


if __name__ == "__main__":
    main()
