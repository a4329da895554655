"""Evidence without processes: documents of the node agent, made from short descriptions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.judge.facts import deciding_thread_ran
from bigsci_launch.spy.look.collect import LOOK_MODULES
from bigsci_launch.spy.taxonomy import HangClass

RECORDINGS = Path(__file__).parent / "recordings"
C10D = "/venv/torch/distributed/distributed_c10d.py"
ENGINE = "/venv/deepspeed/runtime/pipe/engine.py"
TENSOR = "/src/bigsci_launch/train/parallel/tensor.py"

AN_HOUR_S = 3600.0
STORE = "[0:0:0:0:0:0:0:0]:29500"
"""Where the store listens: at all addresses."""
Document = dict[str, Any]


def an_hour_later(document: Document) -> Document:
    """Return a recording as the kernel would show it an hour later: who did not run between the looks sleeps on.

    Recordings are of jobs that had just begun to hang, and no verdict calls that a hang.
    """
    nodes = document.get("nodes", [document])
    evidence = Bundle(document.get("collection", {}), tuple(nodes)).evidence()
    asleep = {
        (seen.node, seen.pid): str(seen.thread.tid if seen.thread else seen.pid)
        for seen in evidence.ranks
        if deciding_thread_ran(seen) is False
    }
    for node in nodes:
        for rank in node["ranks"]:
            if (node["node"], rank["pid"]) in asleep:
                rank["samples"][-1]["thread_idle_s"] = {asleep[node["node"], rank["pid"]]: AN_HOUR_S}
    return document


@pytest.fixture(scope="session")
def aged() -> Callable[[Document], Document]:
    return an_hour_later


def frames_of(text: str) -> list[Document]:
    """`all_reduce@c10d:10 < step@/src/train.py:5`, innermost first."""
    files = {"c10d": C10D, "engine": ENGINE, "tensor": TENSOR}
    found = []
    for part in text.split(" < "):
        function, _, place = part.partition("@")
        file, _, line = (place or "/src/train.py:1").rpartition(":")
        found.append({"function": function, "file": files.get(file, file), "line": int(line)})
    return found


def rank_of(
    rank: int,
    stack: str | Sequence[str] | None,
    *,
    state: str = "S",
    wchan: str = "futex_do_wait",
    cpu_ticks: Sequence[int] = (10, 10),
    owns_gil: bool = False,
    calls: str = "",
    **more: Any,
) -> Document:
    """A rank with two samples, an hour into a hang if it does not run.

    `stack` is one stack, or one per sample; None: it could not be read.

    `calls` are recorded collectives, oldest first: letters are groups in `members`, `!` marks an unfinished one.
    """
    stacks = [stack, stack] if stack is None or isinstance(stack, str) else list(stack)
    samples, extra = [], more.pop("sample", {})
    for index, text in enumerate(stacks):
        sample: Document = {"mono": float(index), "state": state, "wchan": wchan, "cpu_ticks": cpu_ticks[index]}
        sample["voluntary"] = 5
        if text is None:
            sample["why"] = "py-spy gave no answer in 3 s"
        else:
            thread = {"tid": 100 + rank, "name": "MainThread", "active": False, "owns_gil": owns_gil}
            sample["stack"] = {"threads": [{**thread, "frames": frames_of(text)}]}
        samples.append({**sample, **extra})
    if len(samples) > 1 and cpu_ticks[0] == cpu_ticks[-1] and len(set(stacks)) == 1:
        samples[-1].setdefault("thread_idle_s", {str(100 + rank): AN_HOUR_S})
    if calls:
        samples[-1]["recorder"] = recorder_of(calls, more.pop("members", {}))
    return {"rank": rank, "pid": 100 + rank, "step": "0", "samples": samples, **more}


def mesh_of(world_size: int, host: str = "127.0.0.1", store: str | None = STORE) -> list[Document]:
    """The `connections` of the ranks of one gloo group: each opened one to all before it. Rank 0 serves `store`."""
    ranks: list[Document] = []
    for rank in range(world_size):
        opened = [29500, *(40000 + other for other in range(rank))]
        listening = {f"{host}:{40000 + rank}": world_size - 1 - rank}
        ranks.append({"listening": listening, "opened": {host: opened}, "devices": []})
    if store:
        ranks[0]["listening"][store] = world_size
    return ranks


def recorder_of(calls: str, members: Mapping[str, Sequence[int]], first_record: int = 0) -> Document:
    """A recorder from words such as `t t d w!`: group, then operation if it is not all_reduce (`w:barrier!`)."""
    tokens: list[list[str]] = []
    stream, unfinished, last = [], [], {}
    for position, word in enumerate(calls.split()):
        group, _, operation = word.rstrip("!").partition(":")
        token = [group, "", operation or "all_reduce", "[[8]]", "['Float']"]
        if token not in tokens:
            tokens.append(token)
        stream.append(tokens.index(token))
        last[group] = last.get(group, 0) + 1
        if word.endswith("!"):
            unfinished.append(position)
    return {
        "first_record": first_record,
        "tokens": tokens,
        "stream": stream,
        "last_sequence": last,
        "open": unfinished,
        "members": {group: list(ranks) for group, ranks in members.items()},
    }


def make_evidence(
    ranks: Sequence[Document],
    topology: str | None = None,
    ranks_per_node: int = 2,
    problems: Sequence[str] = (),
    **collection: Any,
) -> Evidence:
    """Evidence of ranks on nodes: `make_evidence([rank_of(0, STACK)], "tp=2,dp=2")`."""
    nodes: dict[str, list[Document]] = {}
    for rank in ranks:
        nodes.setdefault(f"n{rank['rank'] // ranks_per_node}", []).append(rank)
    documents = [{"node": node, "clock_ticks_per_s": 100, "ranks": held} for node, held in nodes.items()]
    if problems:
        documents[-1]["problems"] = list(problems)
    return Bundle({"topology": topology, **collection}, tuple(documents)).evidence()


def recorded_evidence(name: str, topology: str | None = None, without: Sequence[str] = ()) -> Evidence:
    """The evidence of a recorded hang; `without` drops keys of every sample."""
    document = an_hour_later(json.loads((RECORDINGS / f"{name}.json").read_text()))
    for rank in document["ranks"]:
        for sample in rank["samples"]:
            for key in without:
                sample.pop(key, None)
    return Bundle({"topology": topology}, (document,)).evidence()


def ended(
    rank: int, code: int | None = None, signal: str | None = None, time: float = 1.0, terminated: float | None = None
) -> Document:
    """The record of a rank's end; `terminated` is when it had been told to end."""
    how = {"code": code, "signal": signal, "terminated": terminated}
    return {"rank": rank, "node": "n0", "pid": 9, "time": time, **how}


def accused(conclusion: Conclusion) -> list[int]:
    """The ranks that the verdict accuses."""
    return [suspect.rank for suspect in conclusion.suspects]


def outcome(conclusion: Conclusion) -> tuple[str, HangClass | None, list[int]]:
    """State, class and accused ranks of a verdict."""
    return conclusion.state.value, conclusion.hang_class, accused(conclusion)


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The generator of hung jobs of any size, which the benchmarks use, too."""
    path = Path(__file__).parents[3] / "benchmarks" / "spy_synthetic.py"
    found = sys.modules["spy_synthetic"] = ModuleType("spy_synthetic")
    exec(compile(path.read_text(), str(path), "exec"), found.__dict__)
    return found


@pytest.fixture(scope="session")
def agent() -> ModuleType:
    """The node agent as a module, with the modules that it imports as attributes."""
    for name in LOOK_MODULES:
        path = resources.files("bigsci_launch") / "assets" / "diagnostics" / f"{name}.py"
        module = sys.modules[name] = ModuleType(name)
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    found = sys.modules["node_agent"]
    found.__dict__.update({name: sys.modules[name] for name in LOOK_MODULES if name != "node_agent"})
    return found
