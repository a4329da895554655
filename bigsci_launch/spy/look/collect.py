"""Collects the evidence: runs the node agent once on every node of a job.

The agent is sent through standard input, so that nodes need not have the package. Each node prints its document in
short lines; complete documents are kept, whatever happens to the others.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import marshal
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any

from bigsci_launch.content import packaged
from bigsci_launch.errors import CollectError
from bigsci_launch.safe_files import parse_json
from bigsci_launch.scheduler.job import MonitorStep
from bigsci_launch.spy.look.ring_copies import read_ring_copies
from bigsci_launch.spy.look.run_records import log_sizes, read_printed, read_records
from bigsci_launch.spy.look.target import Target
from bigsci_launch.topology import Topology, compress_ranks

if TYPE_CHECKING:
    from bigsci_launch.spy.evidence.bundle import Bundle

NODE_TIMEOUT_S = 20.0
STEP_TIMEOUT_S = 40.0
LATE_NODE_S = 12.0  # time a node needs if every process on it blocks its reader
MAX_STEPS = 3
MORE_TIME_S = 20.0
MAX_NATIVE_FRAMES = 40
PARTNER_ARGUMENTS = ("src", "dst", "group_src", "group_dst", "tag", "own_group")
AGENT_MODULES = (
    "safe_files", "node_processes", "node_sockets", "node_kernel", "node_motion", "node_environment", "node_scheduler",
    "node_roles", "node_identity", "node_peek", "node_numbers", "node_ranks", "node_recorder", "ring_file",
    "node_ring", "calls_file", "node_calls", "node_workers", "node_injection", "node_stacks", "node_agent",
)  # fmt: skip
LOOK_MODULES = (*AGENT_MODULES, "node_counters", "node_looks")
"""The modules of a look that lasts: its request has `looks_s`."""
# The submitting machine's Python if the node has it, else the node's own: the agent needs no package.
START_AGENT = 'p=$1; [ -x "$p" ] || p=python3; exec "$p" -I -S -'
PROGRAM = """
import marshal, sys
from binascii import a2b_base64
from zlib import decompress
is_same_python = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER == {magic!r}
codes, sources = {codes!r}, {sources!r}
modules = marshal.loads(decompress(a2b_base64(codes))) if is_same_python else eval(decompress(a2b_base64(sources)))
for name, body in modules.items():
    module = sys.modules[name] = type(sys)(name)
    exec(body, module.__dict__)
sys.modules[{main!r}].main({request!r})
"""
AnswerCallback = Callable[[int, str], None]
"""Called with the number of nodes that have answered and the name of the latest one."""


class WireReader:
    """Assembles the nodes' documents from lines that arrive interleaved, and mixed with unrelated output."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, str]] = {}
        self.documents: dict[str, dict[str, Any]] = {}

    def feed(self, line: str) -> str | None:
        """Process one line; return the name of the node whose document it completed, or None."""
        words = line.split(" ")
        if len(words) != 5 or words[0] != "@bsl" or not (words[2].isdigit() and words[3].isdigit()):
            return None
        _, node, index, count, data = words
        parts = self._parts.setdefault(node, {})
        parts[int(index)] = data
        if len(parts) < int(count):
            return None
        text = zlib.decompress(base64.b64decode("".join(parts[at] for at in sorted(parts)))).decode()
        self.documents[node] = unpack(ast.literal_eval(text))
        return node

    @property
    def torn(self) -> frozenset[str]:
        """Nodes whose documents are incomplete."""
        return frozenset(self._parts) - frozenset(self.documents)


def collect(target: Target, on_answer: AnswerCallback = lambda done, node: None) -> Bundle:
    """Look at a job once: return every document that could be collected, and why the others could not.

    Raises:
        CollectError: no node answered, or none has a process of the step that is wanted.
        SlurmUnavailable: srun is missing.
    """
    began, printed = time.time(), log_sizes(target.attempt)
    nodes, silent = ([], {}) if target.is_over else _ask_nodes(target, on_answer)
    step = target.request.get("step")
    if step is not None and not silent and not any(node["ranks"] or node["others"] for node in nodes):
        raise CollectError(
            f"job {target.label}: step {step} has no process on its nodes",
            hint=f"`{target.scheduler.list_steps.format(job_id=target.job_id)}` lists its steps",
        )
    collection = {
        "job": target.label,
        "time": began,
        "topology": target.topology,
        "world_size": _world_size(target.topology),
        "nodes_asked": [*target.nodes, *target.down],
        "nodes_silent": [{"node": node, "why": why} for node, why in sorted({**target.down, **silent}.items())],
        "is_over": target.is_over,
        "asked": target.asked,
        "scheduler": target.scheduler.name if target.job_id else None,
        "job_id": target.job_id,
        "het_groups": dict(target.groups),
        "py_spy": shutil.which("py-spy"),
        **read_records(target.attempt),
        "printed": read_printed(target.attempt, printed),
        "rings": [_compressed(copy) for copy in read_ring_copies(target.attempt)],
    }
    from bigsci_launch.spy.evidence.bundle import Bundle  # it loads what is known of libraries: late, see cli/spy.py

    return Bundle(collection, tuple(nodes))


def _compressed(copy: dict[str, Any]) -> dict[str, Any]:
    _compress_members(copy["ring"]["recorder"])
    return copy


def missing_recorders(bundle: Bundle) -> dict[str, list[int]]:
    """Return the ranks without recorded collectives, by the reason that their node gives."""
    found: dict[str, list[int]] = {}
    for rank in (rank for node in bundle.nodes for rank in node["ranks"]):
        why = next((sample["recorder_why"] for sample in reversed(rank["samples"]) if "recorder_why" in sample), None)
        if why is not None and not any("recorder" in sample for sample in rank["samples"]):
            found.setdefault(why, []).append(int(rank["rank"]))
    return found


def _world_size(topology: str | None) -> int | None:
    return Topology.parse(topology).world_size if topology else None


def unpack(document: dict[str, Any]) -> dict[str, Any]:
    """Return the agent's document with py-spy's text parsed into stacks; a stack that repeats is stored once."""
    for rank in document["ranks"]:
        shown: dict[str, Any] | None = None
        for sample in rank["samples"]:
            if "dump" in sample:
                _unpack_dump(sample, shown)
            _unpack_children(sample)
            if "native_dump" in sample:
                _unpack_native(sample)
            if "members" in sample.get("recorder", {}):
                _compress_members(sample["recorder"])
            if "ring" in sample:
                _compress_members(sample["ring"]["recorder"])
            shown = sample.get("stack") or (shown if sample.get("same_stack") else None)
    return document


def _compress_members(recorder: dict[str, Any]) -> None:
    """Write groups as `0-383`: a list of all ranks would be the largest part of a large job's document."""
    recorder["members"] = {group: compress_ranks(ranks) for group, ranks in recorder["members"].items()}


def _unpack_dump(sample: dict[str, Any], shown: Mapping[str, Any] | None) -> None:
    """Parse the dump of a sample; `shown` is the stack of the sample before."""
    try:
        stack = {"threads": _read_dump(sample.pop("dump"))}
    except (ValueError, LookupError, TypeError) as error:
        sample["why"] = f"py-spy's output cannot be read: {error}"
        return
    if shown == stack:
        sample["same_stack"] = True
    else:
        sample["stack"] = stack


def _unpack_children(sample: dict[str, Any]) -> None:
    """Add the stacks of child processes to the kernel's facts about them."""
    dumps = sample.pop("child_dumps", {})
    for child in sample.get("children", []):
        try:
            if str(child["pid"]) in dumps:
                child["stack"] = {"threads": _read_dump(dumps[str(child["pid"])])}
        except (ValueError, LookupError, TypeError):
            continue  # the dump is incomplete


def _unpack_native(sample: dict[str, Any]) -> None:
    """Store native and Python frames as text, innermost first: `clock_nanosleep (libc.so.6)`."""
    try:
        sample["native"] = [
            {
                "tid": thread["os_thread_id"],
                "name": thread["thread_name"],
                "frames": [_words_of(frame) for frame in thread["frames"][:MAX_NATIVE_FRAMES]],
            }
            for thread in parse_json(sample.pop("native_dump"))
        ]
    except (ValueError, LookupError, TypeError) as error:
        sample["native_why"] = f"py-spy's output cannot be read: {error}"


def _words_of(frame: Mapping[str, Any]) -> str:
    file = frame["short_filename"] or frame["filename"]
    return f"{frame['name']} ({file}:{frame['line']})" if frame["line"] else f"{frame['name']} ({file})"


def _read_dump(text: str) -> list[dict[str, Any]]:
    """Return py-spy's threads, innermost frame first, without fields that are not used."""
    return [
        {
            "tid": thread["os_thread_id"],
            "name": thread["thread_name"],
            "active": thread["active"],
            "owns_gil": thread["owns_gil"],
            "frames": [_read_frame(frame) for frame in thread["frames"]],
        }
        for thread in parse_json(text)
    ]


def _read_frame(frame: Mapping[str, Any]) -> dict[str, Any]:
    """Return one frame. Of its variables, only the integers that tell a communication apart are kept."""
    numbers = {
        each["name"]: int(each["repr"])
        for each in frame.get("locals") or ()
        if each["name"] in PARTNER_ARGUMENTS and str(each.get("repr") or "").isdigit()
    }
    from bigsci_launch.spy.evidence.known_code import operation_of

    place = {"function": frame["name"], "file": frame["filename"], "line": frame["line"]}
    is_communication = operation_of(frame["name"], frame["filename"]) is not None
    return {**place, "arguments": numbers} if numbers and is_communication else place


def _ask_nodes(target: Target, on_answer: AnswerCallback) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run the agent on all nodes of a job; return the documents, and why the other nodes did not answer.

    Slurm does not start a step if one of its nodes cannot be reached: the step is retried without that node.
    """
    reader = WireReader()
    silent: dict[str, str] = {}
    left, words, program = list(target.nodes), "", agent_program(target)
    deadline = AnswerDeadline(len(target.nodes), STEP_TIMEOUT_S + more_time(target), settle_time(target))
    for _ in range(MAX_STEPS):
        if not left or time.monotonic() >= deadline.until:
            break
        step = MonitorStep(
            ["/bin/sh", "-c", START_AGENT, "sh", sys.executable],
            left,
            until=lambda: deadline.until,
            on_line=lambda line: _take(reader, line, on_answer, deadline),
            stdin=program,
            groups=target.groups,
        )
        end = target.scheduler.run_on_nodes(target.job_id, step)
        words = end.words or words
        silent |= {node: f"{target.scheduler.name} could not start the step there" for node in end.refused_nodes}
        if not end.refused_nodes:
            break
        left = [node for node in left if node not in silent and node not in reader.documents]
    by_starter = f" ({target.scheduler.starter}: {words})" if words else ""
    for node in target.nodes:
        if node not in reader.documents:
            silent.setdefault(node, _why_silent(node, reader, by_starter, deadline))
    if not reader.documents:
        raise no_answer(target, silent, words)
    return list(reader.documents.values()), {node: why for node, why in silent.items() if node not in reader.documents}


class AnswerDeadline:
    """How long to wait for the nodes: once half have answered, the rest get little more time than those took.

    Every node takes `settle_s` seconds longer than it needs.
    """

    def __init__(self, num_nodes: int, limit_s: float, settle_s: float = 0.0) -> None:
        self._num_nodes, self._is_cut, self._settle_s = num_nodes, False, settle_s
        self._began = time.monotonic()
        self.until = self._began + limit_s + settle_s

    def hear(self, num_answered: int) -> None:
        """Called at each answer."""
        if not self._is_cut and 2 * num_answered >= self._num_nodes:
            now = time.monotonic()
            self._is_cut = True
            self.until = min(self.until, now + max(LATE_NODE_S, 2 * (now - self._began - self._settle_s)))

    @property
    def seconds(self) -> float:
        return self.until - self._began


def _take(reader: WireReader, line: str, on_answer: AnswerCallback, deadline: AnswerDeadline) -> None:
    node = reader.feed(line)
    if node is not None:
        deadline.hear(len(reader.documents))
        on_answer(len(reader.documents), node)


def _why_silent(node: str, reader: WireReader, words: str, deadline: AnswerDeadline) -> str:
    if node in reader.torn:
        return "its answer is incomplete"
    return f"no answer in {deadline.seconds:.0f} s{words}"


def more_time(target: Target) -> float:
    """Return the extra seconds that a node gets for evidence that is read only on request."""
    return MORE_TIME_S if target.request.get("native") or target.request.get("flight_recorder") else 0.0


def settle_time(target: Target) -> float:
    """Return the seconds for which every node keeps looking before it answers."""
    return float(target.request.get("settle_s") or target.request.get("looks_s") or 0.0)


def no_answer(target: Target, silent: Mapping[str, str], words: str) -> CollectError:
    """Return the error to raise when no node answered."""
    reasons = words or "; ".join(sorted(set(silent.values()))[:2]) or "none of its nodes responds"
    by_hand = target.scheduler.command_on_node(
        "hostname", target.job_id, group=min(target.groups.values(), default=None)
    )
    return CollectError(f"job {target.label}: no node answered: {reasons}", hint=f"try by hand: {by_hand}")


def agent_program(target: Target) -> str:
    """Return the node agent, the modules it imports and its request, as one program for `python -`.

    It contains byte code, which starts faster, for nodes with the same Python version, and source code for the others.
    """
    folder, modules = packaged("diagnostics"), LOOK_MODULES if target.request.get("looks_s") else AGENT_MODULES
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in modules}
    codes = {name: SourceFileLoader(name, str(folder / f"{name}.py")).get_code(name) for name in modules}
    name = {} if target.job_id or not target.nodes else {"node": target.nodes[0]}
    request = {**name, **target.request, "node_timeout_s": NODE_TIMEOUT_S + more_time(target), "framed": True}
    return PROGRAM.format(
        magic=importlib.util.MAGIC_NUMBER,
        codes=base64.b64encode(zlib.compress(marshal.dumps(codes), 1)),
        sources=base64.b64encode(zlib.compress(repr(sources).encode(), 1)),
        main=modules[-1],
        request=request,
    )
