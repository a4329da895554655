"""What part of a step the ring costs: the same ranks with and without it, in turns, by CPU time.

    python benchmarks/ring_share.py [--page docs/measurements/ring-share.md]

Steps with the ring and without it alternate in each process: on, off, off, on. Two processes that do the same differ by
several percent in CPU time, with nothing but where their memory is. What other programs take from the ranks is no CPU
time of theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ranks import free_port
from slow_looks import hurry

from bigsci_launch.content import packaged

RANKS, NICE, GOAL = 2, -15, 0.005
STYLES = {"ddp": "DDP", "hand": "an `all_reduce` for each of 48 gradients"}


@dataclass(frozen=True, slots=True)
class Share:
    """CPU ms of a step and rank without the ring, by which part each group of four steps took longer with it, and the
    records in a step."""

    style: str
    step_ms: float
    longer: list[float]
    records: float


def run(words: Sequence[str]) -> list[Any]:
    """Run a program of `slowed` on two ranks, and return what they print."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        given = {
            **{"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
            **{"OMP_NUM_THREADS": "1", "BSL_RING_DIR": folder},
            "PYTHONPATH": os.pathsep.join(map(str, (packaged("diagnostics", "ring_site"), here))),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", *words], env={**os.environ, **given, "RANK": str(rank)}, stdout=subprocess.PIPE
            )
            for rank in range(RANKS)
        ]
        try:
            return [json.loads(rank.communicate()[0]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()


def measure(style: str, groups: int) -> Share:
    """Train with two ranks."""
    found = run(["slowed.stepper", style, str(4 * groups)])
    rows = [each["seconds"][at : at + 4] for each in found for at in range(0, 4 * groups, 4)]
    longer = [(row[0] + row[3]) / (row[1] + row[2]) - 1 for row in rows]
    bare = median((row[1] + row[2]) / 2 for row in rows)
    return Share(style, bare * 1e3, longer, found[0]["records"] / (2 * groups))


HEAD = """\
<!-- Made by `python benchmarks/ring_share.py --page docs/measurements/ring-share.md`. -->

# What part of a step the ring costs

Two ranks of gloo on CPUs train four transformer layers with a `DataLoader` and AdamW. In each of them, steps with the
ring and without it alternate: with, without, without, with. The CPU time of the thread that trains, and writes the
ring, in the steps with it is compared with that of the steps without it, in each such group. What other programs take
from the ranks is not in it. The load of the last minute was {load:.0f}.{note} The goal is less than 0.5 % of a step.
The interval holds the median in 95 of 100 cases. *Under 0.5 %*: of steps that are longer than this, with as many
records, by the median and by the end of its interval.

| gradients are averaged by | CPU time of a step | records | groups | longer: median | a record | under 0.5 % |
|---|---|---|---|---|---|---|
"""
TAIL = """
Not in it is what the wrappers of functions cost while there is no ring: a call through and a look-up, well below a
microsecond each.

What a single record takes is [measured apart](trace-cost.md) in a loop: 2 to 4 us. In a step it takes several times as
long. Nothing in it waits or calls the kernel. But after a wait for another rank, or a pass over the gradients, each
part of it takes three to four times as long, as what is no longer in the caches of a core does. Records of a call that
does nothing, with the ring and without it in turns, by what the ranks did before each of them:

| before each record | a record takes |
|---|---|
| nothing | {nothing:.1f} us |
| an `all_reduce`, in which ranks wait for each other | {wait:.1f} us |
| that, and an addition to 2 MiB of numbers | {add:.1f} us |
"""


def page_of(shares: Sequence[Share], record: Mapping[str, float], note: str) -> str:
    return (
        HEAD.format(load=os.getloadavg()[0], note=f" {note}" if note else "")
        + "".join(map(_row, shares))
        + TAIL.format(**record)
    )


def _row(each: Share) -> str:
    (low, high), middle = around_median(each.longer), median(each.longer)
    return (
        f"| {STYLES[each.style]} | {each.step_ms:.0f} ms | {each.records:.0f} | {len(each.longer)} | "
        f"{middle:.2%} ({low:.2%} to {high:.2%}) | {middle * each.step_ms / each.records * 1e3:.1f} us | "
        f"{middle * each.step_ms / GOAL:.0f} ms ({high * each.step_ms / GOAL:.0f} ms) |\n"
    )


def around_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval that holds the median in 95 of 100 cases, by the order of the values."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    middle = (len(ordered) - 1) / 2
    return ordered[max(0, round(middle - half))], ordered[min(len(ordered) - 1, round(middle + half))]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--groups", type=int, default=150, help="groups of four steps")
    options.add_argument("--page", type=Path)
    options.add_argument("--note", default="", help="how the ranks ran, for the page")
    given = options.parse_args()
    hurry(NICE if os.geteuid() == 0 else 0)
    text = page_of([measure(style, given.groups) for style in STYLES], run(["slowed.waiter"])[0], given.note)
    print(text)
    if given.page:
        given.page.write_text(text)


if __name__ == "__main__":
    main()
