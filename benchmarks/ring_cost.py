"""What the ring costs, next to other ways to keep the calls of a rank, in one run.

    python benchmarks/ring_cost.py [--page docs/measurements/trace-cost.md]

One rank trains a small GPT and averages each gradient by an all_reduce of gloo. Every way runs the same steps in a
process of its own, in turns, and the fastest turn counts. Each process is bound to one CPU: gloo's thread may otherwise
wake on another one, which takes longer than any way to keep the calls. At its end each process kills itself with
SIGKILL: what lies on disk then is what would be left of a rank that was killed. `ring_train.py` adds runs of
bsl train.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import ring_train

import bigsci_launch

HERE = Path(__file__).parent
RING_SITE = Path(bigsci_launch.__file__).parent / "assets" / "diagnostics" / "ring_site"
STEPS, WARM_STEPS, TURNS = 40, 10, 5
CALLS, BLOCK = 20_000, 200
CACHE = Path(tempfile.gettempdir()) / "bsl-benchmark-cache"
BARE, RING, RING_IN_MEMORY = "nothing", "the ring", "the ring, on /dev/shm"
TRACE_IN_C, TRACE_IN_PYTHON = "the ring and a call trace, in C", "the ring and a call trace, in Python"
TRACE_OF_OTHERS = "the ring and a call trace of another package, in C"
TRACES = {TRACE_IN_C: ["torch", "small", "__main__"], TRACE_IN_PYTHON: ["torch", "small", "__main__"],
          TRACE_OF_OTHERS: ["no_such_package"]}  # fmt: skip
RANK = """
import os, signal, sys, time
if os.environ["CPU"]:
    os.sched_setaffinity(0, {int(os.environ["CPU"])})
sys.path.insert(0, os.environ["LOOPS"])
import torch, torch.distributed as dist
from small import make_model, VOCABULARY, LENGTH
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = make_model()
parameters = list(model.parameters())
optimizer = torch.optim.AdamW(parameters)
tokens = torch.randint(VOCABULARY, (int(os.environ["SAMPLES"]), LENGTH + 1))
averaging, BLOCK = [], int(os.environ["BLOCK"])

def step():
    optimizer.zero_grad()
    loss = model(tokens)
    loss.backward()
    began = time.perf_counter()
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
    averaging.append(time.perf_counter() - began)
    optimizer.step()

def train():
    seconds = []
    for _ in range(int(os.environ["STEPS"])):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds

def collectives():
    value = torch.ones(1)
    return blocks(lambda: dist.all_reduce(value), int(os.environ["CALLS"]))

def tiny(value):
    return value

def calls():
    seconds = []
    for _ in range(int(os.environ["CALLS"]) // BLOCK):
        began = time.perf_counter()
        for _ in range(BLOCK):
            tiny(1)
        seconds.append((time.perf_counter() - began) / BLOCK)
    return seconds

def blocks(call, count):
    seconds = []
    for _ in range(count // BLOCK):
        began = time.perf_counter()
        for _ in range(BLOCK):
            call()
        seconds.append((time.perf_counter() - began) / BLOCK)
    return seconds

def report(seconds, each, tiny, more=None):
    import json
    told = {"steps": seconds, "averaging": averaging[: len(seconds)], "each": each, "tiny": tiny, "parts": more}
    with open(os.environ["REPORT"], "w") as file:
        json.dump({**told, "num_collectives": len(parameters)}, file)
    os.kill(os.getpid(), signal.SIGKILL)
"""
PARTS = """
def nothing(tensor, op=None, group=None, async_op=False):
    return None

def wait(work):
    return None

def parts():
    import ring_file, ring_torch, ring_hook
    torch_module, value, lane, frame = dist.distributed_c10d, torch.ones(1), ring_hook.lane(), sys._getframe()
    group = ring_torch.group_of(lane.ring, torch_module, None)
    facts = ring_torch.facts_of(lane.ring, group, frame, "all_reduce", value, None)
    wrapped = ring_torch.recorded(torch_module, "all_reduce", 0, 2)(nothing)
    # An all_reduce waits for its own work: no call of the program.
    inside = {"waited": ring_torch.wait(wait), "wait": wait, "work": object()}
    body = "def call():\\n    waited(work)\\ndef bare():\\n    wait(work)"
    exec(compile(body, "distributed_c10d.py", "exec"), inside)
    def passed(*arguments, **named):
        return nothing(*arguments, **named)
    calls = {
        "": lambda: None,
        "bare": lambda: nothing(value),
        "whole": lambda: wrapped(value),
        "passed": lambda: passed(value),
        "bare wait": inside["bare"],
        "wait": inside["call"],
        "lane": ring_hook.lane,
        "group": lambda: ring_torch.group_of(lane.ring, torch_module, None),
        "facts": lambda: ring_torch.facts_of(lane.ring, group, frame, "all_reduce", value, None),
        "frame": lambda: sys._getframe(1),
        "enter": lambda: lane.enter(facts, 1),
        "leave": lambda: lane.leave(lane.count - 1),
    }
    taken = {name: [] for name in calls}
    for _ in range(100):
        for name, call in calls.items():
            taken[name] += blocks(call, BLOCK)
    fastest = {name: min(each) for name, each in taken.items()}
    found = {name: seconds - fastest[""] for name, seconds in fastest.items()}
    return {**found, **alternating()}

def alternating():
    module, kept = dist.distributed_c10d, (dist.all_reduce, dist.distributed_c10d.Work.wait)
    bare = tuple(each._bsl_original for each in kept)
    found = ([], [])
    for number in range(2 * int(os.environ["STEPS"])):
        dist.all_reduce, module.Work.wait = bare if number % 2 else kept
        step()
        found[number % 2].append(averaging[-1])
    dist.all_reduce, module.Work.wait = kept
    return {"in step": min(found[0]) / len(parameters), "bare in step": min(found[1]) / len(parameters)}
"""
PLAIN = "report(train(), collectives(), calls())\n"
WAYS = {
    BARE: PLAIN,
    RING: PARTS + "report(train(), collectives(), calls(), parts())\n",
    RING_IN_MEMORY: PLAIN,
    **dict.fromkeys(TRACES, PLAIN),
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": PLAIN,
    "cProfile": "import cProfile\np = cProfile.Profile()\np.enable()\n" + PLAIN,
    "viztracer": "import viztracer\nv = viztracer.VizTracer(output_file='viz.json', verbose=0)\nv.start()\n" + PLAIN,
    "stdlib trace, each line to a file": (
        "import trace\nsys.stdout = open('lines.txt', 'w')\n"
        "t = trace.Trace(count=False, trace=True)\nreport(t.runfunc(train), t.runfunc(collectives), t.runfunc(calls))\n"
    ),
}
NEEDS = {"viztracer": "viztracer"}
FEWER = {"stdlib trace, each line to a file": 20, "cProfile": 1, "viztracer": 1}
"""By how much fewer collectives a way makes that is slow."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One process: seconds of its steps, of their averaging, of an all_reduce in a loop, of a call of a function that
    does nothing, and what was left on disk."""

    steps: Sequence[float]
    averaging: Sequence[float]
    each: Sequence[float]
    tiny: Sequence[float]
    num_collectives: int
    parts: Mapping[str, float] | None
    left: int


def run_turn(way: str, samples: int, calls: int, cpu: str, steps: int = STEPS) -> Turn:
    """Run the steps in one way."""
    with tempfile.TemporaryDirectory() as text, memory_folder(way) as rings:
        folder = Path(text)
        report = folder / "report.json"
        given = {"LOOPS": str(HERE / "foreign_loops"), "STEPS": str(steps), "CALLS": str(calls), "BLOCK": str(BLOCK)}
        given |= {"SAMPLES": str(samples), "REPORT": str(report), "CPU": cpu}
        given |= {"PYTHONPATH": path_of_python(HERE.parent), "OMP_NUM_THREADS": "1"}
        if way.startswith(RING):
            given |= {"BSL_RING_DIR": rings or text, "PYTHONPATH": path_of_python(RING_SITE, HERE.parent)}
            if way in TRACES:
                file = folder / "requests" / "trace.json"
                given |= {"BSL_TRACE": str(file), "XDG_CACHE_HOME": str(CACHE)}
                file.parent.mkdir()
                file.write_text(json.dumps({"include": TRACES[way]}))
            if way == TRACE_IN_PYTHON:
                given |= {"CC": "no-compiler", "XDG_CACHE_HOME": "/dev/null"}
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
        kept = [each for place in filter(None, (text, rings)) for each in Path(place).iterdir() if each.is_file()]
        left = sum(each.stat().st_size for each in kept if each.name not in own)
    return Turn(
        told["steps"][WARM_STEPS:], told["averaging"][WARM_STEPS:], told["each"], told["tiny"],
        told["num_collectives"], told["parts"], left,
    )  # fmt: skip


def path_of_python(*first: Path) -> str:
    """Return PYTHONPATH with some folders before those that are in it."""
    return os.pathsep.join(filter(None, (*map(str, first), os.environ.get("PYTHONPATH"))))


def memory_folder(way: str) -> AbstractContextManager[str | None]:
    """Return a folder in memory for the way that needs one."""
    return tempfile.TemporaryDirectory(dir="/dev/shm") if way == RING_IN_MEMORY else nullcontext()


def measure(samples: int) -> dict[str, list[Turn]]:
    """Run every way that is installed, in turns."""
    ways = [way for way in WAYS if way not in NEEDS or find_spec(NEEDS[way])]
    found: dict[str, list[Turn]] = {way: [] for way in ways}
    cpu = str(max(os.sched_getaffinity(0)))
    for turn in range(TURNS):
        for way in ways:
            print(f"turn {turn + 1} of {TURNS}: {way}", file=sys.stderr, flush=True)
            found[way].append(run_turn(way, samples, CALLS // FEWER.get(way, 1), cpu))
    return found


def unbound(samples: int) -> list[float]:
    """Return the seconds of a bare all_reduce in processes that may use every CPU."""
    return sorted(statistics.mean(run_turn(BARE, samples, CALLS, "", 1).each) for _ in range(2 * TURNS))


def step_s(turns: Sequence[Turn]) -> float:
    return min(statistics.median(turn.steps) for turn in turns)


def loop_s(turns: Sequence[Turn]) -> float:
    """Return the seconds of an all_reduce in a loop."""
    return min(min(turn.each) for turn in turns)


def in_step_s(turns: Sequence[Turn]) -> float:
    """Return the seconds of an all_reduce in a step."""
    return min(min(turn.averaging) / turn.num_collectives for turn in turns)


def call_s(turns: Sequence[Turn]) -> float:
    """Return the seconds of a call of a function that does nothing."""
    return min(min(turn.tiny) for turn in turns)


def table(found: Mapping[str, Sequence[Turn]]) -> str:
    """Return the table in Markdown."""
    bare = found[BARE]
    rows = [
        "| kept by | one step | slower | more for an all_reduce: in a loop | in a step | for a Python call | left |"
    ]
    rows += ["|---|---|---|---|---|---|---|"]
    for way, turns in found.items():
        loop, in_step, call = (1e6 * (measured(turns) - measured(bare)) for measured in (loop_s, in_step_s, call_s))
        left = turns[-1].left
        rows.append(
            f"| {way} | {step_s(turns) * 1e3:.2f} ms | {step_s(turns) / step_s(bare):.3f}x | {loop:.2f} us | "
            f"{in_step:.2f} us | {call:.3f} us | {'nothing' if left == 0 else f'{left / 2**20:.2f} MiB'} |"
        )
    rows += [f"| {way} | not installed | | | | | |" for way in WAYS if way not in found]
    return "\n".join(rows)


def parts(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the fastest microseconds of each part of a record."""
    told = [turn.parts for turn in turns if turn.parts is not None]
    return {name: 1e6 * min(each[name] for each in told) for name in told[0]}


def parts_table(part: Mapping[str, float]) -> str:
    """Return where the time of a record goes, in Markdown."""
    whole = part["whole"] - part["bare"]
    named = {
        "to call through `*arguments, **named`": part["passed"] - part["bare"],
        "the lane of this thread": part["lane"],
        "the process group, of which `None` is the world": part["group"],
        "operation, call site, type, shape: one look-up": part["frame"] + part["facts"],
        "to write that it was entered": part["enter"],
        "to write that it was left": part["leave"],
    }
    rows = [f"| {words} | {value:.2f} us |" for words, value in named.items()]
    rows.append(f"| the rest: arguments, number in the group, checks | {whole - sum(named.values()):.2f} us |")
    rows.append(f"| **record around a function that does nothing** | **{whole:.2f} us** |")
    rows.append(f"| `Work.wait`, which an `all_reduce` calls by itself | {part['wait'] - part['bare wait']:.2f} us |")
    return "\n".join(["| part | takes |", "|---|---|", *rows])


PAGE = """\
<!-- Made by `python benchmarks/ring_cost.py --page docs/measurements/trace-cost.md`. -->

# What it costs to keep the calls of a rank

One rank of a small GPT trains on a CPU, and averages {count} gradients by an `all_reduce` of gloo in each step. The
fastest of {turns} turns counts; a turn is {steps} steps, without the first {warm}, and up to {calls} collectives.
Every process is bound to one CPU, which it shares with other programs. Differences of a few percent of
a step are noise. *Left* is what was on disk after SIGKILL. A Python call is one of a function that does nothing, begin
and end.

{table}

## What a record consists of

{parts}

The calls of a program are the same in each step, so the ring keeps what it knows of a call: its operation, group, call
site, type and shape are looked up at once, and names are written when they are new. A record is two writes into mapped
memory, without a system call. To call through, to find the lane and to write both ends take {least:.2f} us together: a
record that did not say which call it was would cost no less in Python. A verdict needs the rest.

In a step, where the model has replaced what was in the caches, a recorded `all_reduce` takes {alternating:.2f} us more
than a bare one. For this number, steps with and without the ring alternate in one process. Two processes must not be
compared unless they are bound: the same bare `all_reduce` took from {low:.0f} to {high:.0f} us in {number} processes
that were not. It depends on whether gloo's thread wakes on the same CPU or on another one, and on what else runs.

It does not matter whether the ring is in a file on disk or in memory. The kernel writes a page of a file back every 30
seconds, and only the next write to that page is slower.

## Share of a training step

By the cost in a step, the {count} records of a step are {share:.2f} % of this step of {step:.1f} ms. They are less than
0.1 % of a step that takes longer than {length:.0f} ms, and {seconds:.4f} % of one that takes a second.

{train}

## Call traces

The ring keeps calls of `torch.distributed`, not every Python call: it cannot replace a profiler. A
[call trace](../how-to/trace.md#trace-the-calls-of-your-own-code) keeps those of the packages that are named to it. In
this table it keeps every call of `torch`, of the model and of the program: {events} bytes an event, in a file that does
not grow. Where no traced package is called, it costs what the row of another package says. This is Python {python}.
"""


def page(found: Mapping[str, Sequence[Turn]], spread: Sequence[float], train: str) -> str:
    """Return the page of the manual."""
    part, count = parts(found[RING]), found[RING][0].num_collectives
    more, step = part["in step"] - part["bare in step"], step_s(found[BARE])
    return PAGE.format(
        count=count,
        turns=TURNS,
        steps=STEPS,
        warm=WARM_STEPS,
        calls=CALLS,
        table=table(found),
        parts=parts_table(part),
        least=part["passed"] - part["bare"] + part["lane"] + part["enter"] + part["leave"],
        alternating=more,
        low=1e6 * spread[0],
        high=1e6 * spread[-1],
        number=len(spread),
        share=count * more / step / 1e4,
        step=step * 1e3,
        length=count * more,
        seconds=count * more / 1e4,
        train=train,
        events=16,
        python=".".join(map(str, sys.version_info[:2])),
    )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=64, help="samples of 16 tokens in a step")
    parser.add_argument("--page", type=Path, help="write the page to this file; this also trains with bsl train")
    arguments = parser.parse_args()
    found = measure(arguments.samples)
    print(table(found), parts_table(parts(found[RING])), sep="\n\n")
    if arguments.page:
        spread = unbound(arguments.samples)
        part = parts(found[RING])
        train = ring_train.words(part["in step"] - part["bare in step"])
        arguments.page.write_text(page(found, spread, train), encoding="utf-8")


if __name__ == "__main__":
    main()
