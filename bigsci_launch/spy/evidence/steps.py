"""Which step of a job is the training, where several hold processes that may be ranks.

A loop that watches the nodes is a step too (`srun --overlap ... &`). Slurm numbers its tasks from 0 like those of the
training, so that such a number means nothing outside of its step. Other numbers, such as RANK, do: some scripts start a
step on each node, and their ranks are one training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bigsci_launch.scheduler.hostlist import compress_hostlist
from bigsci_launch.spy.evidence.numbering import NumberedBy

AgentRecord = Mapping[str, Any]
OF_ITS_STEP = (NumberedBy.TASK.value, NumberedBy.COUNTED.value)


def without_other_steps(nodes: Sequence[AgentRecord]) -> tuple[list[AgentRecord], list[str]]:
    """Return the nodes' documents without ranks that only another step than the training's numbers, and what was left
    out, in words."""
    ranks: dict[Any, list[tuple[str, AgentRecord]]] = defaultdict(list)
    for node in nodes:
        for rank in node.get("ranks", []):
            ranks[rank.get("step")].append((str(node["node"]), rank))
    if len(ranks) < 2:
        return list(nodes), []
    chosen = max(ranks, key=lambda step: _likelihood(step, [rank for _, rank in ranks[step]]))

    def is_other(rank: AgentRecord) -> bool:
        return rank.get("step") != chosen and rank.get("source") in OF_ITS_STEP

    kept: list[AgentRecord] = [
        {**node, "ranks": [rank for rank in node.get("ranks", []) if not is_other(rank)]} for node in nodes
    ]
    return kept, [
        _left_out(step, chosen, [node for node, rank in found if is_other(rank)])
        for step, found in sorted(ranks.items(), key=lambda item: str(item[0]))
        if any(is_other(rank) for _, rank in found)
    ]


def _likelihood(step: Any, ranks: Sequence[AgentRecord]) -> tuple[int, int, int, int, int]:
    """Return how likely a step is the training: by its Python programs, its other processes, ranks that have a number
    of their own, and CPU time; then the step that was started last, because who watches is there before."""
    num_python = sum(bool(rank.get("is_python", True)) for rank in ranks)
    num_named = sum(rank.get("source") not in OF_ITS_STEP for rank in ranks)
    seconds = sum(sample.get("cpu_ticks") or 0 for rank in ranks for sample in rank["samples"][:1]) // 100
    return num_python, len(ranks), num_named, seconds, int(step) if str(step).isdigit() else -1


def _left_out(step: Any, chosen: Any, nodes: Iterable[str]) -> str:
    where = list(nodes)
    count = "1 process" if len(where) == 1 else f"{len(where)} processes"
    place = compress_hostlist(dict.fromkeys(where))
    return f"step {step}, with {count} on {place}: step {chosen} looks like the training; `--step {step}` shows it"
