"""What `bsl nodes` prints: tables, lines and JSON documents. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bigsci_launch.nodes.bisection import SlowFound
from bigsci_launch.nodes.memory import BadNode
from bigsci_launch.nodes.speeds import OftenSlow
from bigsci_launch.scheduler.hostlist import compress_hostlist

SCHEMA_VERSION = 1
NODE_COLUMNS = ("node", "reason", "left out until", "seen in", "cluster", "evidence")
SPEED_COLUMNS = ("slow node", "slow in", ">times longer", "newest run")
CHECK_COLUMNS = ("node", "verdict", ">cpu Mflop/s", ">memory MiB/s", ">shm MiB/s", ">exchange MiB/s", "gpu", "why")
_WORDS = {"failed_check": "failed check", "by_hand": "by hand", "not_known": "not known", "gpu": "GPU", "ecc": "ECC"}


def words_of(name: str) -> str:
    return _WORDS.get(name, name)


def until_text(entry: BadNode) -> str:
    """Return when a node is used again, in UTC."""
    if entry.expires is None:
        return "it is forgiven"
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(entry.expires))


def entry_line(entry: BadNode) -> str:
    """`n1 until 2026-11-24 03:20 UTC: lost: Slurm lost the node n1 (run demo, attempt 0001, rank 2)`."""
    seen = f" ({entry.seen_in})" if entry.seen_in else ""
    return f"{entry.node} until {until_text(entry)}: {words_of(entry.reason)}: {entry.evidence}{seen}"


def node_rows(entries: Sequence[BadNode]) -> list[list[str]]:
    """Return the rows of `bsl nodes` under `NODE_COLUMNS`."""
    return [
        [
            entry.node,
            words_of(entry.reason),
            until_text(entry),
            entry.seen_in or (f"by {entry.by}" if entry.by else "not known"),
            entry.cluster or "not known",
            entry.evidence,
        ]
        for entry in entries
    ]


def entry_document(entry: BadNode) -> dict[str, Any]:
    return asdict(entry)


def speed_rows(slow: Sequence[OftenSlow]) -> list[list[str]]:
    """Return the rows of `bsl nodes` under `SPEED_COLUMNS`."""
    return [
        [each.node, f"{each.slow_runs} of {each.runs} runs", f"{each.times_longer:.2f}", each.newest_run]
        for each in slow
    ]


def speed_advice(slow: Sequence[OftenSlow]) -> str:
    """Return what can be done about slow nodes: only a person leaves them out."""
    names = compress_hostlist([each.node for each in slow])
    return f"slow, but not left out: bsl nodes check --nodelist {names}, or: bsl nodes add {names} --reason slow"


def nodes_document(
    entries: Sequence[BadNode], memory: str, cluster: str | None, slow: Sequence[OftenSlow]
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "memory": memory,
        "cluster": cluster,
        "nodes": [entry_document(entry) for entry in entries],
        "often_slow": [asdict(each) for each in slow],
    }


def check_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of `bsl nodes check` under `CHECK_COLUMNS`."""
    return [_check_row(node) for node in sorted(document["nodes"], key=lambda node: str(node["node"]))]


def _check_row(node: Mapping[str, Any]) -> list[str]:
    rates = {test["name"]: test["value"] for test in node["tests"]}
    exchanged = sorted(peer["value"] for peer in node["peers"] if peer["value"] is not None)
    rates["exchange"] = exchanged[len(exchanged) // 2] if exchanged else None
    shown = (rates.get(name) for name in ("cpu", "memory", "shared memory", "exchange"))
    gpus = f"{node['gpus']} tried" if node.get("gpus") is not None else "not tried"
    why = "; ".join([part for part in (node["why"], *node["not_tried"]) if part])
    return [
        node["node"],
        words_of(node["verdict"]),
        *("-" if rate is None else f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}" for rate in shown),
        gpus,
        why,
    ]


def check_advice(document: Mapping[str, Any]) -> list[str]:
    """Return what to do next about nodes that failed or are slow."""
    failed = [node["node"] for node in document["nodes"] if node["verdict"] == "failed"]
    slow = [node["node"] for node in document["nodes"] if node["verdict"] == "slow"]
    lines = [f"left out from now on: {', '.join(failed)}   (bsl nodes)"] if failed else []
    if slow:
        lines.append(
            f"slow, but not left out: measure again, or: bsl nodes add {compress_hostlist(slow)} --reason slow --days 1"
        )
    return lines


def slow_lines(found: SlowFound, spares: int) -> list[str]:
    """Return the answer of a search for slow nodes."""
    if found.reference_s is None:
        return ["no group could be timed: unknown which nodes are slow"]
    lines = [f"{node}: {ratio:.1f} times slower than healthy nodes" for node, ratio in sorted(found.slow.items())] or [
        f"no slow node among {len(found.good)}, if at most {spares} are slow"
    ]
    lines += [f"unknown: {compress_hostlist(group)}" for group in found.unexplained]
    if found.are_too_many:
        lines.append(f"more than {spares} are slow: there may be others; search again with more spares")
    return [*lines, f"healthy: {compress_hostlist(sorted(found.good))} ({found.reference_s:.2f} s)"]


def slow_document(found: SlowFound, spares: int) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "spares": spares,
        "slow": [{"node": node, "times_slower": ratio} for node, ratio in found.slow.items()],
        "good": list(found.good),
        "not_known": [list(group) for group in found.unexplained],
        "reference_s": found.reference_s,
        "rounds": found.num_rounds,
        "are_too_many": found.are_too_many,
    }
