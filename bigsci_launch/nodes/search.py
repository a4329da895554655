"""Finds slow nodes: holds nodes in a job, and times a program on groups of them until single nodes are left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bigsci_launch.content import packaged
from bigsci_launch.errors import ConfigError, SlurmUnavailable
from bigsci_launch.nodes.bisection import (
    NodeGroup,
    SlowFound,
    absorb_round,
    begin_search,
    end_search,
    next_round,
)
from bigsci_launch.nodes.check import NodeRequest
from bigsci_launch.nodes.memory import BadNode, make_entry
from bigsci_launch.scheduler.allocation import hold_nodes, release_nodes, time_on_group, wait_for_nodes
from bigsci_launch.scheduler.hostlist import compress_hostlist

NAME = "bsl-nodes-bisect"
HOLD_MINUTES = 60
LIMIT_S = 600.0
"""For one program on one group."""
MAX_ROUNDS = 40


def default_program() -> list[str]:
    """Return the program that is timed if the user names none: the check of a node, without its exchange."""
    return [sys.executable, "-I", str(packaged("diagnostics", "check_node.py")), "--work"]


def find_slow_nodes(
    place: NodeRequest, spares: int, program: Sequence[str], smallest: int, tell: Callable[[str], None]
) -> SlowFound:
    """Hold the nodes of `place`, time `program` on groups of them, and return which are slow: at most `spares`.

    `smallest` is the least number of nodes on which the program runs. `tell` gets a line for each group.

    Raises:
        SlurmUnavailable, SlurmRefused: Slurm gave no nodes; ConfigError: there are too few nodes.
    """
    job_id = hold_nodes(name=NAME, options=place.as_options, minutes=HOLD_MINUTES)
    try:
        nodes = wait_for_nodes(job_id)
        tell(f"job {job_id} holds {compress_hostlist(nodes)}")
        try:
            search = begin_search(nodes, spares, smallest=smallest)
        except ValueError as error:
            raise ConfigError(f"--spares {spares}: {error}", hint="use more nodes, or fewer spares") from error
        while (groups := next_round(search)) and search.num_rounds < MAX_ROUNDS:
            seconds = _time_groups(job_id, program, groups)
            for group, taken in seconds.items():
                tell(f"round {search.num_rounds + 1}: {_group_text(group)}: {_seconds_text(taken)}")
            search = absorb_round(search, seconds)
        return end_search(search)
    finally:
        release_nodes(job_id)


def _time_groups(job_id: str, program: Sequence[str], groups: Sequence[NodeGroup]) -> dict[NodeGroup, float | None]:
    """Time all groups at once, and return their seconds; None for one that could not be timed."""

    def time_one(group: NodeGroup) -> float | None:
        try:
            return time_on_group(job_id, program, group.nodes, limit_s=LIMIT_S)
        except SlurmUnavailable:
            return None

    with ThreadPoolExecutor(max_workers=len(groups)) as pool:
        return dict(zip(groups, pool.map(time_one, groups), strict=True))


def _group_text(group: NodeGroup) -> str:
    fillers = f" (with {compress_hostlist(group.fillers)})" if group.fillers else ""
    return compress_hostlist(group.members) + fillers


def _seconds_text(taken: float | None) -> str:
    return "failed, or did not end" if taken is None else f"{taken:.2f} s"


def slow_entries(found: SlowFound, program: Sequence[str], cluster: str | None) -> list[BadNode]:
    what = " ".join(program)[:200]
    return [
        make_entry(node, "slow", f"{ratio:.1f} times slower than healthy nodes, twice: {what}", cluster=cluster)
        for node, ratio in found.slow.items()
    ]
