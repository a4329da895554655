"""Labelled ends of jobs: how often `bsl why`, and two other ways to look, give the right kind and who failed first.

    python benchmarks/ends_corpus.py [--wrong]
    python benchmarks/ends_corpus.py --add SET FOLDER    # FOLDER/corpus/NAME/ and FOLDER/labels/NAME.json

The ends are in rows/ends.json.gz, in sets by who labelled them. An end may have several kinds that are defensible, and
several first failures. `exit` is what the last exit code, signal or Slurm state in the logs says, `traceback` what the
last line of the last traceback says.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from bigsci_launch.errors import BslError
from bigsci_launch.topology.ranks import expand_ranks
from bigsci_launch.why.answer import Why
from bigsci_launch.why.find import why_logs

ROWS = Path(__file__).parent / "rows" / "ends.json.gz"
NO_ONE = "-"
"""Who failed first is not in the files."""
STATES = {
    "OUT_OF_ME": "out_of_memory", "TIMEOUT": "time_limit", "NODE_FAIL": "node_failure", "PREEMPTED": "preempted",
    "CANCELLED": "cancelled", "COMPLETED": "finished",
}  # fmt: skip
EXIT = re.compile(
    r"(?:exit ?code[: =]+|exited with (?:exit )?code |return code = |status )(?P<code>-?\d+)"
    r"|\b(?:JobState=|State=)(?P<state>[A-Z_]+)|\b(?P<word>Killed|Out Of Memory)\b"
)
RAISED = re.compile(r"(?:\S*\]:?)? ?[A-Za-z_.]+(?:Error|Exception|Interrupt)\b")
LAST = {
    "out_of_memory": r"OutOfMemory|MemoryError|out of memory|RESOURCE_EXHAUSTED",
    "disk": r"No space left|quota|Read-only file system|Input/output error",
    "hang": r"[Tt]imed out|[Tt]imeout",
    "network": r"Connection (?:reset|closed|refused)|NCCL error|ncclSystemError|ncclRemoteError",
    "launch_failed": r"ModuleNotFoundError|No such file",
    "cancelled": r"KeyboardInterrupt|SignalException",
}


@dataclass(frozen=True)
class LabelledEnd:
    """The files of one end, and what an engineer concludes from them."""

    set: str
    name: str
    files: dict[str, str]
    kinds: list[str]
    first: list[str]
    """`rank 3`, `task 1`, `node n2` or `-`; the others are defensible as well."""


@dataclass(frozen=True)
class Answered:
    """An end, and what three ways to look make of it."""

    end: LabelledEnd
    why: str
    first: str
    exit: str
    traceback: str


def read_ends() -> list[LabelledEnd]:
    """Return the labelled ends of all sets."""
    with gzip.open(ROWS, "rt", encoding="utf-8") as stream:
        return [LabelledEnd(**row) for row in json.load(stream)]


def add(name: str, folder: Path) -> None:
    """Put a set of ends into the rows, in the place of one with that name."""
    kept = [end for end in (read_ends() if ROWS.exists() else []) if end.set != name]
    new = [_read_end(name, each, folder / "labels") for each in sorted((folder / "corpus").iterdir())]
    text = json.dumps([asdict(end) for end in [*kept, *new]], indent=0)
    with ROWS.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as stream:
        stream.write(text.encode())
    print(f"{len(new)} ends of {name}, {len(kept)} of other sets")


def _read_end(name: str, folder: Path, labels: Path) -> LabelledEnd:
    label = json.loads((labels / f"{folder.name}.json").read_text())
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {str(path.relative_to(folder)): path.read_text(errors="replace") for path in paths}
    also = label.get("first_also") or []
    first = [label["first"], *([also] if isinstance(also, str) else also)]
    return LabelledEnd(name, folder.name, files, label["kinds"], first)


def answer(end: LabelledEnd) -> Answered:
    """Ask in the three ways."""
    with tempfile.TemporaryDirectory() as text:
        for name, content in end.files.items():
            path = Path(text) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, errors="replace")
        try:
            why = why_logs([Path(text)])
            kind, first = why.kind, judge_first(end.first, why)
        except BslError as error:
            kind, first = f"error: {error.message}", "unknown"
    whole = "\n".join(end.files.values())
    return Answered(end, kind, first, by_exit(whole), by_traceback(whole))


def judge_first(truth: Sequence[str], why: Why) -> str:
    """Whether the first failure is `right`, `unknown` though it is in the files, or `wrong`: an innocent is named."""
    ranks, node = {*why.culprit.ranks, *why.culprit.tasks}, why.culprit.node
    if not ranks and not node:
        return "right" if NO_ONE in truth else "unknown"
    listed = re.findall(r"(?:rank|task)s? ([\d,-]*\d)", " ".join(truth))
    numbers = {number for each in listed for number in expand_ranks(each)}
    nodes = set(re.findall(r"(?:node|on) ([\w.:-]+)", " ".join(truth)))
    if ranks and numbers:
        return "right" if ranks <= numbers else "wrong"
    if node and nodes:
        return "right" if node in nodes else "wrong"
    return "unknown" if not ranks else "wrong"


def by_exit(text: str) -> str:
    found = list(EXIT.finditer(text))
    if not found:
        return "unknown"
    last = found[-1]
    if last["word"]:
        return "out_of_memory"
    if last["state"]:
        return next((kind for state, kind in STATES.items() if last["state"].startswith(state)), "crashed")
    return {"0": "finished", "137": "out_of_memory", "-9": "out_of_memory"}.get(last["code"], "crashed")


def by_traceback(text: str) -> str:
    _, found, after = text.rpartition("Traceback (most recent call last)")
    if not found:
        return "unknown"
    line = next((line for line in after.splitlines()[1:] if RAISED.match(line)), "")
    return next((kind for kind, pattern in LAST.items() if re.search(pattern, line)), "crashed")


def macro_f1(answers: Iterable[Answered], way: Callable[[Answered], str]) -> float:
    """Return the mean of the F1 of each kind that occurs. Of several kinds that are defensible, each is right."""
    right, said, missed, kinds = Counter[str](), Counter[str](), Counter[str](), set[str]()
    for each in answers:
        kind = way(each)
        kinds.add(each.end.kinds[0])
        if kind in each.end.kinds:
            right[kind] += 1
            kinds.add(kind)
        else:
            said[kind] += 1
            missed[each.end.kinds[0]] += 1
    return mean(2 * right[kind] / max(1, 2 * right[kind] + said[kind] + missed[kind]) for kind in kinds)


COLUMNS = (
    "set", "ends", "kind right", "macro-F1", "of the exit code", "of the last traceback", "first right", "not known",
    "wrong",
)  # fmt: skip


def table(answers: Sequence[Answered]) -> str:
    """Return a row for each set."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for name in dict.fromkeys(each.end.set for each in answers):
        mine = [each for each in answers if each.end.set == name]
        firsts = Counter(each.first for each in mine)
        scores = [f"{macro_f1(mine, way):.3f}" for way in WAYS]
        counts = [str(firsts[each]) for each in ("right", "unknown", "wrong")]
        right = sum(each.why in each.end.kinds for each in mine)
        rows.append("| " + " | ".join([name, str(len(mine)), str(right), *scores, *counts]) + " |")
    return "\n".join(rows)


WAYS: tuple[Callable[[Answered], str], ...] = (lambda e: e.why, lambda e: e.exit, lambda e: e.traceback)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs=2, metavar=("SET", "FOLDER"), help="put a set into the rows, and answer nothing")
    parser.add_argument("--wrong", action="store_true", help="print what is wrong")
    options = parser.parse_args()
    if options.add:
        add(options.add[0], Path(options.add[1]))
        return
    answers = [answer(end) for end in read_ends()]
    print(table(answers))
    for each in answers if options.wrong else ():
        if each.why not in each.end.kinds or each.first == "wrong":
            print(
                f"{each.end.set} {each.end.name}: {each.why}, not {each.end.kinds}; first {each.first} {each.end.first}"
            )


if __name__ == "__main__":
    main()
