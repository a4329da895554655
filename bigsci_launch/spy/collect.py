"""Fetching the evidence: the node agent on every node of a job through one Slurm step, or once on this machine.

The agent's text goes through standard input, so that nodes need not see the package. Each node prints its document in
short framed lines; what has come is kept, whatever happens to the rest.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from bigsci_launch.errors import CollectError
from bigsci_launch.scheduler.slurm import run_monitor_step
from bigsci_launch.spy.bundle import Bundle
from bigsci_launch.spy.target import Target, read_records
from bigsci_launch.topology import Topology

NODE_TIMEOUT_S = 20.0
STEP_TIMEOUT_S = 40.0
MAX_STEPS = 3
AGENT_MODULES = ("node_processes", "node_ranks", "node_agent")
# The Python of the submitting side where a node has it, else the node's own: the agent needs no package.
START_AGENT = 'p=$1; [ -x "$p" ] || p=python3; exec "$p" -I -S - "$2"'
Tell = Callable[[int, str], None]
"""Called with the number of nodes that have answered and the name of the newest."""


class FrameReader:
    """Puts the documents of nodes together from lines that arrive mixed and among foreign ones."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, str]] = {}
        self.documents: dict[str, dict[str, Any]] = {}

    def feed(self, line: str) -> str | None:
        """Take in one line; the name of the node whose document it completed, or None."""
        words = line.split(" ")
        if len(words) != 5 or words[0] != "@bsl":
            return None
        _, node, index, count, data = words
        parts = self._parts.setdefault(node, {})
        parts[int(index)] = data
        if len(parts) < int(count):
            return None
        text = zlib.decompress(base64.b64decode("".join(parts[at] for at in sorted(parts))))
        self.documents[node] = json.loads(text)
        return node

    @property
    def torn(self) -> frozenset[str]:
        """Nodes whose documents broke off."""
        return frozenset(self._parts) - frozenset(self.documents)


def collect(target: Target, tell: Tell = lambda done, node: None) -> Bundle:
    """One look at a job: every document that could be had, and why the others could not.

    Raises:
        CollectError: not one node answered; SlurmUnavailable: srun is missing.
    """
    began = time.time()
    nodes, silent = collect_step(target, tell) if target.job_id else (collect_here(target), {})
    collection = {
        "job": target.label,
        "time": began,
        "topology": target.topology,
        "world_size": _world_size(target.topology),
        "nodes_asked": [*target.nodes, *target.down],
        "nodes_silent": [{"node": node, "why": why} for node, why in sorted({**target.down, **silent}.items())],
        **read_records(target.attempt),
    }
    return Bundle(collection, tuple(nodes))


def _world_size(topology: str | None) -> int | None:
    return Topology.parse(topology).world_size if topology else None


def collect_here(target: Target) -> list[dict[str, Any]]:
    """Run the agent on this machine."""
    request = {**target.request, "node_timeout_s": NODE_TIMEOUT_S}
    argv = [sys.executable, "-I", "-S", "-", json.dumps(request)]
    try:
        done = subprocess.run(
            argv, input=agent_program(), capture_output=True, text=True, timeout=NODE_TIMEOUT_S + 10, check=False
        )
        return [json.loads(done.stdout)]
    except subprocess.TimeoutExpired as error:
        raise CollectError(f"the node agent did not end in {error.timeout:g} s") from error
    except ValueError as error:
        raise CollectError(f"the node agent failed: {done.stderr.strip()[-300:]}") from error


def collect_step(target: Target, tell: Tell) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run the agent on all nodes of a job; the documents, and why other nodes kept silent.

    A step does not start at all when one of its nodes cannot be reached: it is tried again without that node.
    """
    assert target.job_id is not None
    reader = FrameReader()
    silent: dict[str, str] = {}
    left, words = list(target.nodes), ""
    until = time.monotonic() + STEP_TIMEOUT_S
    for _ in range(MAX_STEPS):
        if not left or time.monotonic() >= until:
            break
        step = run_monitor_step(
            target.job_id,
            ["/bin/sh", "-c", START_AGENT, "sh", sys.executable, agent_request(target)],
            nodes=left,
            stdin=agent_program(),
            timeout_s=until - time.monotonic(),
            on_line=lambda line: _take(reader, line, tell),
        )
        words = step.words or words
        silent |= {node: "Slurm could not start the step there" for node in step.refused_nodes}
        if not step.refused_nodes:
            break
        left = [node for node in left if node not in silent and node not in reader.documents]
    for node in target.nodes:
        if node not in reader.documents:
            silent.setdefault(node, _why_silent(node, reader, words))
    if not reader.documents:
        raise no_answer(target, silent, words)
    return list(reader.documents.values()), {node: why for node, why in silent.items() if node not in reader.documents}


def _take(reader: FrameReader, line: str, tell: Tell) -> None:
    node = reader.feed(line)
    if node is not None:
        tell(len(reader.documents), node)


def _why_silent(node: str, reader: FrameReader, words: str) -> str:
    if node in reader.torn:
        return "its answer broke off"
    return f"no answer in {STEP_TIMEOUT_S:g} s" + (f" (srun: {words})" if words else "")


def no_answer(target: Target, silent: Mapping[str, str], words: str) -> CollectError:
    """The error where not one node answered."""
    reasons = words or "; ".join(sorted(set(silent.values()))[:2]) or "no node of it responds"
    return CollectError(
        f"job {target.job_id}: no node answered: {reasons}",
        hint=f"try by hand: srun --overlap --jobid={target.job_id} --gres=gpu:0 hostname",
    )


def agent_request(target: Target) -> str:
    """The agent's argument on a node."""
    return json.dumps({**target.request, "node_timeout_s": NODE_TIMEOUT_S, "framed": True})


def agent_program() -> str:
    """The node agent and its neighbours as one text for `python -`."""
    folder = resources.files("bigsci_launch") / "assets" / "diagnostics"
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in AGENT_MODULES}
    return "\n".join(
        [
            "import sys, types",
            f"for name, source in {sources!r}.items():",
            "    module = sys.modules[name] = types.ModuleType(name)",
            "    exec(compile(source, name + '.py', 'exec'), module.__dict__)",
            "sys.modules['node_agent'].main(sys.argv)",
            "",
        ]
    )
