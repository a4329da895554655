"""The law of `bsl diff-weights`: a random checkpoint with one random change anywhere is never "equal".

    python benchmarks/weights_law.py --cases 100000 --seed 1

A round draws one checkpoint, saves it, and compares it with itself saved again (other orders, layouts, protocols and
containers: must be equal) and with copies that have one random change each (must differ, or be reported as not read).
Each failure is printed with the command that repeats its round.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from weights_changes import Change
from weights_containers import (
    CONTAINERS,
    Files,
    NotSaved,
    again,
    change_files,
    cut_otherwise,
    damage,
    draw_files,
    write_files,
)
from weights_sites import NoSuchChange

from bigsci_launch.errors import BslError
from bigsci_launch.weights.compare.compare import compare_weights
from bigsci_launch.weights.compare.comparison import Comparison
from bigsci_launch.weights.formats.containers import CONTAINERS as PARAMETERS
from bigsci_launch.weights.locate.locate import open_weights

CHANGES_A_ROUND = 6
# Differences that the answer says, but that are no part of the state: DeepSpeed does not initialize its padding,
# wrappers put a prefix before all names, and only torch's own state dicts have versions of modules. With each, the kind
# of change that it excuses.
SAID = (
    ("padding behind", "bit"),
    ("about the run", ""),
    ("names are compared without", "key renamed"),
    ("versions of modules", "entry removed"),
)


# Changes that may change all parts of an entry.
WIDE = ("class", "type of a value", "shape, same elements")


@dataclass(frozen=True)
class Verdict:
    """One case: what was changed, where, and what is wrong with the answer ("" if nothing)."""

    container: str
    kind: str
    place: str
    code: int
    wrong: str = ""

    def __str__(self) -> str:
        return f"{self.container}, {self.kind} at {self.place}: {self.wrong}"


def compared(a: Path, b: Path) -> tuple[int, Comparison | None, str]:
    """Return the exit code of a comparison, the comparison, and its error if it has none."""
    try:
        found = compare_weights(open_weights(a, "a"), open_weights(b, "b"))
    except BslError as error:
        return error.exit_code, None, str(error)
    return found.exit_code, found, ""


def names_in(found: Comparison) -> list[str]:
    """Return the names of everything that differs, as the answer shows them."""
    return [*(one.title for one in found.differences), *(one.name for one in found.value_differences)]


def judge_equal(a: Path, b: Path) -> tuple[int, str]:
    """Return the exit code of a comparison of equal checkpoints, and what is wrong with it."""
    code, found, error = compared(a, b)
    if found is None:
        return code, f"stopped: {error}"
    if found.differences or found.value_differences:
        return code, f"differs: {describe(found)}"
    if found.unreadable:
        return code, f"unreadable: {found.unreadable[0].why}"
    return code, ""


def judge_change(a: Path, b: Path, change: Change) -> tuple[int, str]:
    """Return the exit code of a comparison of a checkpoint with a changed one, and what is wrong with it."""
    code, found, error = compared(a, b)
    if code == 0:
        notes = found.notes if found else ()
        is_said = any(text in note and change.kind.startswith(kind) for text, kind in SAID for note in notes)
        return code, "" if is_said else "EQUAL"
    if code not in (1, 4):
        return code, f"exit code {code}: {error}"
    if found is None or not change.is_local:
        return code, ""
    names = names_in(found)
    if not names:
        return code, "" if found.not_read else f"names nothing: {found.unreadable[:1]}"
    if not any(text in name for text in _texts(change) for name in names):
        return code, f"does not name the entry: {describe(found)}"
    # A tensor of an odd kind has parts, and a class has arguments: all of them are in the entry.
    is_one = len(names) == 1 or change.kind in WIDE or any(_begin_alike(names, text) for text in _texts(change))
    return code, "" if is_one else f"names {len(names)}: {describe(found)}"


def _begin_alike(names: Sequence[str], text: str) -> bool:
    """Whether all names begin as the first one does up to a text in it."""
    beginning = names[0][: names[0].rfind(text) + len(text)] if text in names[0] else names[0]
    return not text or all(name.startswith(beginning) for name in names)


def _texts(change: Change) -> list[str]:
    """Return texts, one of them in the name of the changed entry: its key, and for an element the key of its series."""
    # An answer shows text that no terminal can print, such as half a character, by its escape.
    steps = change.path[-2:] if change.path and change.path[-1].kind == "index" else change.path[-1:]
    # The parameters' container, such as `module`, is left out of names.
    are_plain = all(
        type(step.key) in (str, int) and str(step.key).isprintable() and step.key not in PARAMETERS for step in steps
    )
    is_named = are_plain and len(change.path) > 1 and all(step.kind != "attribute" for step in steps)
    return [str(step.key) for step in steps] if is_named else [""]


def describe(found: Comparison) -> str:
    """Return the first differences of an answer."""
    tensors = [f"{one.name!r} {one.kind}" for one in found.differences]
    values = [f"{one.name!r} {one.a and one.a.text!r} -> {one.b and one.b.text!r}" for one in found.value_differences]
    return "; ".join([*tensors, *values][:4])


def run_round(seed: str, folder: Path, only: str | None = None) -> Iterator[Verdict]:
    """Draw one checkpoint and yield the verdicts on all of its copies. `only` names its container."""
    source = random.Random(seed)
    container, files, whole = _first(source, folder, only)
    with suppress(NotSaved):
        code, wrong = judge_equal(whole, write_files(folder / "again", again(files, source), source))
        yield Verdict(container, "saved again", "", code, wrong)
    with suppress(NoSuchChange):
        otherwise = cut_otherwise(files, source)
        code, wrong = judge_equal(whole, write_files(folder / "otherwise", otherwise, source))
        yield Verdict(container, "cut otherwise", "", code, wrong)
        change, made = change_files(container, files, source)
        if change.is_local:
            cut = write_files(folder / "changed", cut_otherwise(made, source), source)
            code, wrong = judge_change(whole, cut, change)
            yield Verdict(container, f"{change.kind}, cut otherwise", change.place, code, wrong)
    for number in range(CHANGES_A_ROUND):
        with suppress(NotSaved, NoSuchChange):
            change, made = change_files(container, files, source)
            code, wrong = judge_change(whole, write_files(folder / f"b{number}", made, source), change)
            yield Verdict(container, change.kind, change.place, code, wrong)
    cut = write_files(folder / "cut", files, source)
    place = damage(cut, source)
    code, wrong = judge_change(whole, cut, Change("cut", (), None, False))
    yield Verdict(container, "cut", place, code, wrong)


def _first(source: random.Random, folder: Path, only: str | None) -> tuple[str, Files, Path]:
    for number in count():
        container, files = draw_files(source, only)
        with suppress(NotSaved):
            return container, files, write_files(folder / f"a{number}", files, source)
    raise AssertionError


def guarded_round(seed: str, folder: Path, only: str | None) -> Iterator[Verdict]:
    """As `run_round`; an error is a verdict, too."""
    try:
        yield from run_round(seed, folder, only)
    except Exception as error:
        yield Verdict("", "error", "", -1, f"{type(error).__name__}: {error} {traceback.format_exc()[-400:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--rounds", type=int, help="stop after so many rounds")
    parser.add_argument("--only", choices=CONTAINERS, help="draw only this container")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="weights-law-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    counts: Counter[tuple[str, str, int]] = Counter()
    failures, begin, number = 0, time.monotonic(), arguments.first
    last = arguments.first + arguments.rounds if arguments.rounds else sys.maxsize
    try:
        while counts.total() < arguments.cases and number < last:
            folder = root / str(number)
            folder.mkdir()
            for verdict in guarded_round(f"{arguments.seed}/{number}", folder, arguments.only):
                counts[verdict.container, verdict.kind.partition(": file")[0], verdict.code] += 1
                if verdict.wrong:
                    failures += 1
                    print(f"{verdict}\n    --seed {arguments.seed} --first {number} --rounds 1", flush=True)
            shutil.rmtree(folder)
            number += 1
    finally:
        shutil.rmtree(root)
    seconds = time.monotonic() - begin
    for key, cases in sorted(counts.items(), key=str):
        print(*key, cases)
    rate = 1000 * seconds / max(1, counts.total())
    print(f"{counts.total():,} cases in {seconds:,.0f} s ({rate:.1f} ms a case), {failures} failures")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
