"""Judges what the nodes of a check have measured.

    srun ... check_node.py | python -I -S bsl-job.pyz check-verdict --nodes 'n0 n1 n2 n3' --into DIR

A node has `failed` if a test found something wrong, if it sees fewer GPUs than the others, or if none of its exchanges
worked while its partners' others did. It is `slow` if a rate is below that of the others' median by a factor: 1.25 on a
GPU, 2 elsewhere, where other work disturbs more. It is `not_known` if it gave no result, or if only a pair is at fault.
Otherwise it is `ok`; tests that were not tried are named.

Prints a line for each node that is not ok. Exits with 3 if a node failed, and otherwise with 0: what could not be
checked ends nothing. DIR gets `result.json` and one file for each node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bigsci_launch import safe_files

NodeRecord = dict[str, Any]

SCHEMA_VERSION = 1
PREFIX = "@check "
FAILED = 3
GPU_FACTOR, FACTOR = 1.25, 2.0
LIMIT_S = 100.0
"""Longer than check_node.py takes, with the start of its step."""
ORDER = ("failed", "slow", "not_known", "ok")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Judge what the nodes of a check have measured.")
    parser.add_argument("--nodes", required=True, help="names of all nodes, separated by blanks")
    parser.add_argument("--into", type=Path, required=True, help="folder for the results")
    options = parser.parse_args(arguments)
    document = judge(read_lines(sys.stdin.fileno(), LIMIT_S), options.nodes.split())
    store(options.into, document)
    for line in summary(document):
        with contextlib.suppress(OSError):
            os.write(1, f"{line}\n".encode())
    return FAILED if document["verdict"] == "failed" else 0


def read_lines(descriptor: int, limit_s: float) -> list[str]:
    """Return the lines that arrive until the end of the input, or until the time is up."""
    deadline, data = time.monotonic() + limit_s, b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        more = os.read(descriptor, 65536)
        if not more:
            break
        data += more
    return data.decode(errors="replace").splitlines()


def judge(lines: Sequence[str], names: Sequence[str]) -> NodeRecord:
    """Return the verdict on each node, on those of `names` first."""
    records = [record for line in lines if (record := parse(line)) is not None]
    results = {record["node"]: record for record in records if record["kind"] == "result"}
    started = [record["node"] for record in records]
    nodes = [judge_node(name, results, name in started) for name in dict.fromkeys([*names, *started])]
    verdicts = {node["verdict"] for node in nodes}
    verdict = next((each for each in ORDER if each in verdicts), "not_known")
    factors = {"gpu": GPU_FACTOR, "other": FACTOR}
    strangers = sum(record.get("strangers", 0) for record in results.values())
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict,
        "slow_factors": factors,
        "strangers": strangers,
        "nodes": nodes,
    }


def parse(line: str) -> NodeRecord | None:
    """Return the record in a line of check_node.py; None for any other line."""
    try:
        record = safe_files.parse_json(line.partition(PREFIX)[2])
        return record if isinstance(record["node"], str) and record["kind"] in ("start", "result") else None
    except (ValueError, LookupError, TypeError):
        return None


def judge_node(name: str, results: dict[str, NodeRecord], has_started: bool) -> NodeRecord:
    own = results.get(name)
    if own is None:
        why = "its check started, but gave no result" if has_started else "its check did not start"
        return {"node": name, "verdict": "not_known", "why": why, "not_tried": [], "tests": [], "peers": []}
    others = {other: record for other, record in results.items() if other != name}
    for verdict, reasons in (
        ("failed", [*failures(own), *missing_gpus(own, others), *broken_network(own, others)]),
        ("slow", slow_tests(own, others)),
        ("not_known", broken_pairs(own)),
        ("ok", []),
    ):
        if reasons or verdict == "ok":
            break
    return {
        "node": name,
        "verdict": verdict,
        "why": "; ".join(reasons),
        "not_tried": [f"{test['name']}: {test['why']}" for test in own["tests"] if test["status"] == "not_tried"],
        "tests": own["tests"],
        "peers": own["peers"],
        "gpus": own["gpus"],
        "seconds": own["seconds"],
    }


def failures(own: NodeRecord) -> list[str]:
    return [f"{test['name']}: {test['why']}" for test in own["tests"] if test["status"] == "failed"]


def missing_gpus(own: NodeRecord, others: dict[str, NodeRecord]) -> list[str]:
    """A node that sees fewer GPUs than most of the others has lost one."""
    counts = Counter(record["gpus"] for record in others.values() if record["gpus"] is not None)
    if own["gpus"] is None or not counts:
        return []
    usual, number = counts.most_common(1)[0]
    if own["gpus"] < usual and number * 2 > len(others):
        return [f"it has {own['gpus']} GPUs, but {number} of {len(others)} other nodes have {usual}"]
    return []


def broken_network(own: NodeRecord, others: dict[str, NodeRecord]) -> list[str]:
    """All exchanges of the node failed, with several others, which had others that worked."""
    tried = [peer for peer in own["peers"] if peer["status"] != "not_tried"]
    failed = [peer for peer in tried if peer["status"] == "failed"]
    if len(failed) < 2 or len(failed) < len(tried) or not all(works(others.get(peer["peer"])) for peer in failed):
        return []
    names = ", ".join(peer["peer"] for peer in failed)
    return [f"all exchanges failed, with {names}, which exchange with other nodes: {failed[0]['why']}"]


def works(record: NodeRecord | None) -> bool:
    return record is not None and any(peer["status"] == "ok" for peer in record["peers"])


def broken_pairs(own: NodeRecord) -> list[str]:
    return [
        f"the exchange with {peer['peer']} failed ({peer['why']}): unknown which of the two is at fault"
        for peer in own["peers"]
        if peer["status"] == "failed"
    ]


def slow_tests(own: NodeRecord, others: dict[str, NodeRecord]) -> list[str]:
    """Return the rates that are below those of the others by more than the factor."""
    usual = {name: statistics.median(values) for name, values in gather(others.values()).items()}
    slow = []
    for name, values in gather([own]).items():
        factor = GPU_FACTOR if name.startswith("gpu") else FACTOR
        # Two nodes measure the same exchange: neither is slower.
        if name in usual and values[0] * factor < usual[name] and (name != "exchange" or len(others) > 1):
            slow.append(f"{name}: {values[0]:.3g}, {usual[name] / values[0]:.1f} times slower than the others' median")
    return slow


def gather(records: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the rates by test. All GPUs of a test are compared with each other; a node's exchange is its median."""
    rates: dict[str, list[float]] = {}
    for record in records:
        own: dict[str, list[float]] = {}
        for test in record["tests"]:
            if test["value"] is not None:
                own.setdefault(" ".join(word for word in test["name"].split() if not word.isdigit()), []).append(
                    test["value"]
                )
        exchanged = [peer["value"] for peer in record["peers"] if peer["value"] is not None]
        for name, values in own.items():
            rates.setdefault(name, []).append(min(values))
        if exchanged:
            rates.setdefault("exchange", []).append(statistics.median(exchanged))
    return rates


def summary(document: NodeRecord) -> list[str]:
    """Return one line for the whole check, and one for each node that is not ok."""
    nodes = document["nodes"]
    counts = Counter(node["verdict"] for node in nodes)
    said = ", ".join(f"{counts[verdict]} {verdict.replace('_', ' ')}" for verdict in ORDER if counts[verdict])
    lines = [f"bsl: node check: {said or 'no node answered'}"]
    lines += [
        f"bsl: {node['node']}: {node['verdict'].replace('_', ' ')}: {node['why']}"
        for node in nodes
        if node["verdict"] != "ok"
    ]
    skipped = Counter(reason for node in nodes for reason in node["not_tried"])
    return lines + [f"bsl: not tried on {number} nodes: {reason}" for reason, number in skipped.items()]


def store(folder: Path, document: NodeRecord) -> None:
    """Write the results, each whole or not at all."""
    for name, record in [("result", document), *((node["node"], node) for node in document["nodes"])]:
        path = folder / f"{name}.json"
        try:
            safe_files.make_folder(folder)
            safe_files.write_file(path, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.write(2, f"bsl: the verdict on the nodes: cannot write {path}: {error}\n".encode())
