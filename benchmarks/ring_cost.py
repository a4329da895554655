"""What the ring costs, next to other ways to keep the calls of a rank, in one run.

    python benchmarks/ring_cost.py [--page docs/explanation/trace-cost.md]

One rank trains a small GPT and averages each gradient by an all_reduce of gloo. Every way runs the same steps in a
process of its own, in turns, and the fastest turn counts. At its end each process kills itself with SIGKILL: what lies
on disk then is what would be left of a rank that was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import bigsci_launch

HERE = Path(__file__).parent
DIAGNOSTICS = Path(bigsci_launch.__file__).parent / "assets" / "diagnostics"
STEPS, WARM_STEPS, TURNS = 40, 10, 3
CALLS = 20_000
RANK = """
import os, signal, sys, time
sys.path.insert(0, os.environ["LOOPS"])
import torch, torch.distributed as dist
from small import make_model, VOCABULARY, LENGTH
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1)
model = make_model()
parameters = list(model.parameters())
optimizer = torch.optim.AdamW(parameters)
tokens = torch.randint(VOCABULARY, (int(os.environ["SAMPLES"]), LENGTH + 1))

def step():
    optimizer.zero_grad()
    loss = model(tokens)
    loss.backward()
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
    optimizer.step()

def train():
    seconds = []
    for _ in range(int(os.environ["STEPS"])):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds

def collectives():
    value, count = torch.ones(1), int(os.environ["CALLS"])
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(value)
    return (time.perf_counter() - began) / count if count else 0.0

def report(seconds, each):
    import json
    with open(os.environ["REPORT"], "w") as file:
        json.dump({"steps": seconds, "collective": each, "num_collectives": len(parameters)}, file)
    os.kill(os.getpid(), signal.SIGKILL)
"""
PLAIN = "report(train(), collectives())\n"
WAYS = {
    "nothing": PLAIN,
    "the ring": PLAIN,
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": PLAIN,
    "cProfile": "import cProfile\np = cProfile.Profile()\np.enable()\n" + PLAIN,
    "viztracer": "import viztracer\nv = viztracer.VizTracer(output_file='viz.json', verbose=0)\nv.start()\n" + PLAIN,
    "stdlib trace, each line to a file": (
        "import trace\nsys.stdout = open('lines.txt', 'w')\n"
        "t = trace.Trace(count=False, trace=True)\nreport(t.runfunc(train), t.runfunc(collectives))\n"
    ),
}
NEEDS = {"viztracer": "viztracer"}
FEWER = {"stdlib trace, each line to a file": 20, "cProfile": 1, "viztracer": 1}
"""By how much fewer collectives a way makes that is slow."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One process: median seconds of a step, seconds of an all_reduce, and what was left on disk after SIGKILL."""

    step_s: float
    collective_s: float
    num_collectives: int
    left: Mapping[str, int]


def run_turn(way: str, samples: int, calls: int) -> Turn:
    """Run the steps in one way."""
    with tempfile.TemporaryDirectory() as text, socket.create_server(("127.0.0.1", 0)) as probe:
        folder, port = Path(text), probe.getsockname()[1]
        probe.close()
        report = folder / "report.json"
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOOPS": str(HERE / "foreign_loops")}
        given |= {"STEPS": str(STEPS), "CALLS": str(calls), "SAMPLES": str(samples), "REPORT": str(report)}
        given |= {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
        if way == "the ring":
            given |= {"BSL_RING_DIR": text, "PYTHONPATH": f"{DIAGNOSTICS / 'ring_site'}{os.pathsep}{HERE.parent}"}
        elif way.startswith("TORCH_DISTRIBUTED_DEBUG"):
            given["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        program = folder / "rank.py"
        program.write_text(RANK + WAYS[way])
        done = subprocess.run(
            [sys.executable, str(program)],
            env={**os.environ, **given},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=900,
            check=False,
        )
        if not report.exists():
            raise SystemExit(f"{way}: {done.stderr[-2000:]}")
        told = json.loads(report.read_text())
        own = {report.name, program.name}
        left = {each.name: each.stat().st_size for each in folder.iterdir() if each.is_file() and each.name not in own}
    return Turn(statistics.median(told["steps"][WARM_STEPS:]), told["collective"], told["num_collectives"], left)


def measure(samples: int) -> dict[str, list[Turn]]:
    """Run every way that is installed, in turns."""
    ways = [way for way in WAYS if way not in NEEDS or find_spec(NEEDS[way])]
    found: dict[str, list[Turn]] = {way: [] for way in ways}
    for turn in range(TURNS):
        for way in ways:
            print(f"turn {turn + 1} of {TURNS}: {way}", file=sys.stderr, flush=True)
            found[way].append(run_turn(way, samples, CALLS // FEWER.get(way, 1)))
    return found


def table(found: Mapping[str, Sequence[Turn]]) -> str:
    """Return the table in Markdown."""
    bare = min(turn.step_s for turn in found["nothing"])
    idle = min(turn.collective_s for turn in found["nothing"])
    rows = ["| kept by | one step | slower | more for an all_reduce | on disk after SIGKILL |", "|---|---|---|---|---|"]
    for way, turns in found.items():
        step, each = min(turn.step_s for turn in turns), min(turn.collective_s for turn in turns)
        left = sum(turns[-1].left.values())
        rows.append(
            f"| {way} | {step * 1e3:.2f} ms | {step / bare:.3f}x | {(each - idle) * 1e6:.2f} us | "
            f"{'nothing' if left == 0 else f'{left / 2**20:.2f} MiB'} |"
        )
    rows += [f"| {way} | not installed | | | |" for way in WAYS if way not in found]
    return "\n".join(rows)


PAGE = """\
<!-- Made by `python benchmarks/ring_cost.py --page docs/explanation/trace-cost.md`. -->

# What it costs to keep the calls of a rank

One rank of a small GPT trains on a CPU, and averages {count} gradients by an `all_reduce` of gloo in each step. The
fastest of {turns} turns counts; a turn is {steps} steps, without the first {warm}, and up to {calls} collectives.

{table}

By the cost of one collective, the {count} records of a step are {share:.2f} % of this step of {step:.1f} ms. In a step
of one second they would be {seconds:.3f} %.

The ring keeps calls of `torch.distributed`, not every Python call: it cannot replace a profiler.
"""


def page(found: Mapping[str, Sequence[Turn]]) -> str:
    """Return the page of the manual."""
    bare = min(turn.step_s for turn in found["nothing"])
    idle = min(turn.collective_s for turn in found["nothing"])
    more = min(turn.collective_s for turn in found["the ring"]) - idle
    count = found["the ring"][0].num_collectives
    return PAGE.format(
        count=count,
        turns=TURNS,
        steps=STEPS,
        warm=WARM_STEPS,
        calls=CALLS,
        table=table(found),
        share=100 * count * more / bare,
        step=bare * 1e3,
        seconds=100 * count * more,
    )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=64, help="samples of 16 tokens in a step")
    parser.add_argument("--page", type=Path, help="write the page to this file")
    arguments = parser.parse_args()
    found = measure(arguments.samples)
    print(table(found))
    if arguments.page:
        arguments.page.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
