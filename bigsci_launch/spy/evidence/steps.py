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
# What a program may use to start, on a busy machine: it does not show that the step works.
START_UP_S = 2.0
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
    chosen = _training({step: [rank for _, rank in found] for step, found in ranks.items()})

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


def _training(steps: Mapping[Any, Sequence[AgentRecord]]) -> Any:
    """Return the step that is most likely the training: by its Python programs, its other processes, and ranks with a
    number of their own; of equal ones the one that has clearly used more CPU time, else the one that was started last,
    because what watches is there before.
    """
    likely = max(_likelihood(ranks) for ranks in steps.values())
    seconds = {step: _cpu_seconds(ranks) for step, ranks in steps.items() if _likelihood(ranks) == likely}
    busiest = max(seconds.values())
    return max(
        (step for step, used in seconds.items() if used >= busiest - START_UP_S or used >= busiest / 2),
        key=lambda step: int(step) if str(step).isdigit() else -1,
    )


def _likelihood(ranks: Sequence[AgentRecord]) -> tuple[int, int, int]:
    num_python = sum(bool(rank.get("is_python", True)) for rank in ranks)
    num_named = sum(rank.get("source") not in OF_ITS_STEP for rank in ranks)
    return num_python, len(ranks), num_named


def _cpu_seconds(ranks: Sequence[AgentRecord]) -> float:
    """The CPU seconds that a rank of the step has used on average."""
    return sum(sample.get("cpu_ticks") or 0 for rank in ranks for sample in rank["samples"][:1]) / 100 / len(ranks)


def _left_out(step: Any, chosen: Any, nodes: Iterable[str]) -> str:
    where = list(nodes)
    count = "1 process" if len(where) == 1 else f"{len(where)} processes"
    place = compress_hostlist(dict.fromkeys(where))
    return f"step {step}, with {count} on {place}: step {chosen} looks like the training; `--step {step}` shows it"
