"""Tries nodes on demand: a short job that runs `diagnostics/check_node.py` once on each of them."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bigsci_launch.content import packaged
from bigsci_launch.nodes.memory import BadNode, make_entry
from bigsci_launch.nodes.verdict import judge
from bigsci_launch.scheduler.allocation import run_on_each

NAME = "bsl-nodes-check"
TOKEN = "BSL_CHECK_TOKEN"
"""By what it holds, the nodes of the check know each other; see `diagnostics/check_peers.py`."""
LIMIT_S = 120.0
"""From the first node's first line on; check_node.py ends by itself after a minute."""


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """Where to look for nodes: options of srun by name, without those whose value is None."""

    options: Mapping[str, str | None]
    nodes: int | None
    nodelist: str | None

    @property
    def as_options(self) -> dict[str, str | None]:
        nodes = None if self.nodes is None else str(self.nodes)
        return {**self.options, "nodes": nodes, "nodelist": self.nodelist}


def check_nodes(place: NodeRequest, tell: Callable[[str], None]) -> dict[str, Any]:
    """Try the nodes, and return the verdict on them.

    `tell` gets what Slurm says. Raises:
        SlurmUnavailable, SlurmRefused: Slurm gave no nodes.
    """
    lines: list[str] = []
    argv = [sys.executable, "-I", str(packaged("diagnostics", "check_node.py"))]
    options = {**place.as_options, "time": "5", "input": "none"}
    tell("waiting until Slurm gives the nodes, then for about 10 s")
    secret = {TOKEN: secrets.token_hex(16)}
    words = run_on_each(argv, name=NAME, options=options, limit_s=LIMIT_S, on_line=lines.append, environment=secret)
    if words:
        tell(words)
    return judge(lines, ())


def failed_nodes(document: Mapping[str, Any], cluster: str | None) -> list[BadNode]:
    """Return the entries for the memory: the nodes that failed."""
    return [
        make_entry(node["node"], "failed_check", f"node check: {node['why']}", cluster=cluster)
        for node in document["nodes"]
        if node["verdict"] == "failed"
    ]


def exit_code_of_check(document: Mapping[str, Any]) -> int:
    """Return 0 if all nodes are ok, 1 if one failed or is slow, 4 if one is not known."""
    codes = {"ok": 0, "failed": 1, "slow": 1, "not_known": 4}
    return codes.get(str(document["verdict"]), 4)
