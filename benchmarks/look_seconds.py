"""Times a look of `bsl spy` at 8 hung ranks, on a quiet machine and next to programs that want every core.

    python benchmarks/look_seconds.py [--before TREE] [--busy 0,10,20] [--rounds 5] [--output FILE]

The ranks are torchrun's, on gloo, and wait for one of them (`foreign/programs/parting.py report 0`). TREE is another
checkout of this project: both look in turn, so that what else runs affects both alike. Each of the --busy programs
computes all the time, in a session of its own, as other jobs do: Linux divides a core among sessions. Writes a table
in Markdown. The goal is 3 s on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foreign.case import ForeignCase
from foreign.cases_majority import TORCHRUN
from foreign.field import Setup, started

HERE = Path(__file__).resolve().parents[1]
RANKS = 8
CASE = ForeignCase("look", "own loop", "torchrun", "parting.py", (*TORCHRUN, "report", "0"), "hang",
                   world_size=RANKS, limit_s=600.0)  # fmt: skip
BUSY = "while True: pass"
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Look:
    """One look: its seconds, those of the node agent, the CPU seconds of all, the ranks that were read, the load."""

    seconds: float
    agent_s: float
    cpu_s: float
    num_read: int
    load: float


def main() -> None:
    options = parse_arguments()
    trees = {"before": options.before.resolve()} if options.before else {}
    trees["now"] = HERE
    with tempfile.TemporaryDirectory(prefix="look-") as name:
        folder = Path(name)
        with started(CASE, Setup({"": sys.executable}, None), folder / "ranks") as running:
            while running.reached_s() is None:
                time.sleep(0.2)
            time.sleep(5)  # until the others have come to their collective
            lines = [row for number in options.busy for row in rows_of(number, trees, running.whom(), folder, options)]
    head = (
        "| programs next to it | load | bsl spy | median s | slowest s | node agent, s | CPU s | ranks read | ratio |"
    )
    text = "\n".join([head, "|---:|---:|---|---:|---:|---:|---:|---:|---:|", *lines])
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a look at 8 ranks on a quiet and a busy machine.")
    parser.add_argument("--before", type=Path, metavar="TREE", help="another checkout, which looks in turn")
    parser.add_argument("--busy", type=lambda text: [int(part) for part in text.split(",")], default=[0, 10, 20])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def rows_of(
    number: int, trees: dict[str, Path], whom: list[str], folder: Path, options: argparse.Namespace
) -> list[str]:
    """Return a row for each of `trees`, whose looks take turns next to `number` programs that compute."""
    looks: dict[str, list[Look]] = {name: [] for name in trees}
    with busy(number):
        for turn in range(options.rounds):
            for name, tree in sorted(trees.items(), reverse=turn % 2 == 1):
                looks[name].append(look(tree, whom, folder / f"{number}-{name}-{turn}"))
    base = median(looks["before"], "seconds") if "before" in looks else None
    return [row_of(number, name, each, base) for name, each in looks.items()]


def row_of(number: int, name: str, looks: list[Look], base: float | None) -> str:
    slowest, read = max(each.seconds for each in looks), min(each.num_read for each in looks)
    ratio = f"{median(looks, 'seconds') / base:.2f}" if base else "-"
    cells = [number, f"{median(looks, 'load'):.0f}", name, f"{median(looks, 'seconds'):.1f}", f"{slowest:.1f}"]
    cells += [f"{median(looks, 'agent_s'):.1f}", f"{median(looks, 'cpu_s'):.2f}", read, ratio]
    return "| " + " | ".join(map(str, cells)) + " |"


def median(looks: list[Look], name: str) -> float:
    return statistics.median(getattr(each, name) for each in looks)


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Run `number` programs that compute while the `with` block runs."""
    command = [sys.executable, "-I", "-S", "-c", BUSY]
    programs = [subprocess.Popen(command, start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def look(tree: Path, whom: list[str], folder: Path) -> Look:
    """Ask the `bsl spy` of a checkout once."""
    command = [sys.executable, "-m", "bigsci_launch", "spy", *whom, "--json", "--output", str(folder)]
    before, began = os.times(), time.monotonic()
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    seconds, after = time.monotonic() - began, os.times()
    node = json.loads(next((folder / "nodes").iterdir()).read_text())
    own_s = after.children_user - before.children_user + after.children_system - before.children_system
    num_read = json.loads(done.stdout)["coverage"]["ranks_read"]
    return Look(seconds, node["wall_s"], own_s, num_read, os.getloadavg()[0])


if __name__ == "__main__":
    main()
