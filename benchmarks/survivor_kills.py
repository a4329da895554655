"""Kills ranks of a loop that uses `Survivor`, and counts the seconds until all ranks have done a new step.

    python benchmarks/survivor_kills.py [ddp|fsdp2|hsdp|accelerate|deepspeed] [--seed 0] [--kills 9]
        [--page docs/measurements/survivor.md]

The loop is one of `surviving/` on four gloo ranks, with more and longer steps, under `bsl submit` on this machine with
a standby for each rank. A seed decides what happens to which ranks, and how long after the last standby has come:
kill -9, an exception, SIGSTOP (which the runner ends after a second), two ranks at once, or a second rank as soon as
the next generation has begun. The same loop runs undisturbed, and the losses of all steps are compared. hsdp is fsdp2
with two replicas.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

LOOPS = Path(__file__).parent / "surviving"
FILES = {"hsdp": "fsdp2", "accelerate": "with_accelerate", "deepspeed": "with_deepspeed"}
RANKS, LIMIT_S = 4, 400.0
KINDS = ("kill", "raise", "stop", "two", "again")
WEIGHTS = (6, 4, 3, 4, 3)
FAIL = """
        import os, time
        time.sleep(PAUSE_S)
        if os.path.exists("raise-" + os.environ["RANK"]):
            os.unlink("raise-" + os.environ["RANK"])
            raise RuntimeError("an exception of this rank's own")
"""


@dataclass(frozen=True)
class Injury:
    """What happened to ranks, and the seconds from there to the first step of all ranks in a new generation."""

    kind: str
    ranks: tuple[int, ...]
    seconds: float
    restored_s: float
    source: str


class InjuredLoop:
    """A running job."""

    def __init__(self, loop: str, folder: Path, name: str, pause_s: float) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        text = (
            (LOOPS / f"{FILES.get(loop, loop)}.py")
            .read_text()
            .replace("STEPS, GLOBAL_BATCH, MICRO_BATCH = 40,", "STEPS, GLOBAL_BATCH, MICRO_BATCH = 20000,")
        )
        head = "        total = 0.0\n"
        (self.folder / "loop.py").write_text(text.replace(head, head + FAIL.replace("PAUSE_S", str(pause_s))))
        config = {
            "run": {"name": "loop", "command": [sys.executable, "loop.py"]},
            "slurm": {"site": "local"},
            "parallelism": {"data_parallel_size": RANKS},
            "training": {"global_batch_size": 24, "micro_batch_size": 2, "steps": 20000},
            "survive": {"in_place": True},
            "monitor": {"watch": "off"},
        }
        (self.folder / "run.yaml").write_text(json.dumps(config))
        argv = [sys.executable, "-m", "bigsci_launch", "submit", "run.yaml", "--wait"]
        output = (self.folder / "output.txt").open("w")
        environment = {**os.environ, "REPLICAS": "2" if loop == "hsdp" else "1"}
        self._process = subprocess.Popen(
            argv, cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        self._attempt = self.folder / "runs" / "loop" / "attempts" / "0001"

    def records(self) -> list[dict[str, Any]]:
        path = self._attempt / "recover" / "generations.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []

    def phase(self, name: str, after: int = -1) -> dict[str, Any] | None:
        """Return the newest record of a phase in a generation after `after`."""
        found = [each for each in self.records() if each.get("phase") == name and each["generation"] > after]
        return found[-1] if found else None

    @property
    def generation(self) -> int:
        return max((each["generation"] for each in self.records() if each["event"] == "began"), default=-1)

    def wait(self, what: Callable[[], Any]) -> Any:
        until = time.monotonic() + LIMIT_S
        while not (found := what()):
            if time.monotonic() > until or self._process.poll() is not None:
                sys.exit(f"the loop has not come so far in {LIMIT_S:g} s: {self.folder}\n{self.records()[-4:]}")
            time.sleep(0.01)
        return found

    def injure(self, draw: random.Random) -> Injury:
        self.wait(lambda: self.phase("standby", max(0, self.generation) - 1))
        before = self.generation
        time.sleep(draw.random())
        kind = draw.choices(KINDS, WEIGHTS)[0]
        ranks = tuple(draw.sample(range(RANKS), 2 if kind in ("two", "again") else 1))
        began = time.time()
        if kind == "raise":
            (self.folder / f"raise-{ranks[0]}").touch()
            self.wait(lambda: not (self.folder / f"raise-{ranks[0]}").exists())
            began = time.time()
        else:
            for rank in ranks[:1] if kind == "again" else ranks:
                self._signal(rank, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "again":
            self.wait(lambda: self.generation > before)
            before += 1
            self._signal(ranks[1], signal.SIGKILL)
        stepped = self.wait(lambda: self.phase("first_step", before))
        restored = self.phase("restored", before) or stepped
        source = str(restored.get("source", "unknown"))
        return Injury(kind, ranks, stepped["time"] - began, restored["time"] - began, source)

    def _signal(self, rank: int, number: int) -> None:
        record = json.loads((self._attempt / "pids" / f"rank-{rank:04d}.json").read_text())
        os.kill(record["pid"], number)

    def last_step(self) -> int:
        return max((step for step, _ in self.losses()), default=0)

    def losses(self) -> list[tuple[int, float]]:
        """Return the steps and losses that rank 0 of all generations has printed, in their order."""
        path = self._attempt / "logs" / "rank-0000.log"
        text = path.read_text() if path.exists() else ""
        return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)]

    def end(self) -> None:
        subprocess.run([sys.executable, "-m", "bigsci_launch", "cancel", "loop"], cwd=self.folder, check=True)
        self._process.wait(LIMIT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills ranks of a loop that uses Survivor.")
    parser.add_argument("loop", nargs="?", choices=("ddp", "fsdp2", *FILES), default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--limit", type=float, default=math.inf, help="no further kill after so many seconds")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    folder, draw = Path(tempfile.mkdtemp(prefix="survivor-")), random.Random(options.seed)
    loop = InjuredLoop(options.loop, folder, "injured", 0.1)
    until = time.monotonic() + options.limit
    injuries: list[Injury] = []
    while len(injuries) < options.kills and time.monotonic() < until:
        injuries.append(reported(loop.injure(draw)))
    last = loop.last_step()
    loop.end()
    sound = InjuredLoop(options.loop, folder, "sound", 0.0)
    sound.wait(lambda: sound.last_step() >= last)
    sound.end()
    lines = [*table(injuries), "", *compared(loop.losses(), sound.losses(), last), *sources(injuries)]
    print("\n".join(lines))
    if options.page is not None:
        begin, end = f"<!-- {options.loop} -->", f"<!-- /{options.loop} -->"
        head, rest = options.page.read_text().split(begin)
        options.page.write_text("\n".join([head + begin, *lines, end + rest.split(end)[1]]))


def reported(injury: Injury) -> Injury:
    print(f"{injury.kind} of ranks {injury.ranks}: {injury.seconds:.2f} s, {injury.source}", flush=True)
    return injury


def table(injuries: list[Injury]) -> Iterator[str]:
    yield "| what | how often | state restored, p50 s | first new step, p50 s | p95 s | most s |"
    yield "|---|---|---|---|---|---|"
    groups = {kind: [each for each in injuries if each.kind == kind] for kind in KINDS}
    groups["all"] = injuries
    for name, found in groups.items():
        if found:
            seconds = sorted(each.seconds for each in found)
            p95 = seconds[math.ceil(0.95 * len(seconds)) - 1]
            restored = median(each.restored_s for each in found)
            yield f"| {name} | {len(found)} | {restored:.2f} | {median(seconds):.2f} | {p95:.2f} | {seconds[-1]:.2f} |"


def compared(injured: list[tuple[int, float]], sound: list[tuple[int, float]], last: int) -> Iterator[str]:
    expected, steps = dict(sound), [step for step, _ in injured]
    missing = set(range(1, last + 1)) - set(steps)
    apart = max(abs(loss / expected[step] - 1) for step, loss in injured if step in expected)
    backs = [before + 1 - step for before, step in pairwise(steps) if step <= before]
    once, lost = (sum(back for back in backs if (back > 2) == is_lost) for is_lost in (False, True))
    yield f"{last} steps. Relative difference of all printed losses from the undisturbed run: {apart:.1e} at most."
    yield f"Steps whose line is missing: {len(missing)}."
    yield f"Lines that come again: {once} of a step that is repeated, {lost} of a lost state."


def sources(injuries: list[Injury]) -> Iterator[str]:
    counts = Counter(each.source for each in injuries)
    found = ", ".join(f"{source} {count}" for source, count in counts.items())
    yield f"Where the rank that lacked most had its state from: {found}."


if __name__ == "__main__":
    main()
