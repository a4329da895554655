"""Compares what `bsl why`, the exit code alone and the last traceback say with what is true. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from failing.case import Grades, LaunchFailure, Truth

NOT_SAID = Grades("unknown", "unknown", "unknown")
KIND_OF_STATE = {
    "TIMEOUT": "time_limit",
    "CANCELLED": "cancelled",
    "NODE_FAIL": "node_failure",
    "PREEMPTED": "preempted",
    "OUT_OF_MEMORY": "out_of_memory",
    "FAILED": "crashed",
}
TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
LABEL = re.compile(r"^(?:\[rank ?(\d+)\]|\s*(\d+): )|\[rank (\d+)\]")
LAST_LINE = re.compile(r"(?:^|[\]:|]\s*|\d: )([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b.*)$")
CONSEQUENCES = re.compile(r"Connection|ChildFailed|CalledProcess|SignalException|closed by peer|Timed out|WorkerGroup")


def judge_why(failure: LaunchFailure, truth: Truth, said: Mapping[str, Any], nodes: Mapping[str, str]) -> Grades:
    """Grade an answer of `bsl why --json`. `nodes` are the names of nodes by their addresses."""
    first = said["first_failure"]
    node = nodes.get(first["node"], first["node"])
    kind = "right" if said["kind"] in failure.kinds else "unknown" if said["kind"] == "unknown" else "wrong"
    ranks = set(first["ranks"]) | (set(first["tasks"]) if is_by_task(failure) else set())
    if truth.node is None and not truth.ranks:
        return Grades(kind, "wrong" if ranks or first["tasks"] or node else "right", "wrong" if node else "-")
    by_place = first["local_rank"] is not None and node is not None
    if failure.whose == "node":
        rank = "right" if node == truth.node else "wrong" if ranks and not ranks <= set(truth.ranks) else "unknown"
    elif ranks:
        rank = "right" if ranks <= set(truth.ranks) else "wrong"
    elif by_place:
        rank = "right" if (first["local_rank"], node) == (truth.local_rank, truth.node) else "wrong"
    elif first["local_rank"] is not None:
        rank = "unknown" if first["local_rank"] == truth.local_rank else "wrong"
    else:
        rank = "right" if failure.whose == "ranks of a node" and node == truth.node else "unknown"
    return Grades(kind, rank, "unknown" if node is None else "right" if node == truth.node else "wrong")


def is_by_task(failure: LaunchFailure) -> bool:
    """Whether a task of Slurm is a rank."""
    return failure.launcher == "srun" or failure.tasks > 1


def judge_state(failure: LaunchFailure, truth: Truth, state: str) -> Grades:
    """Grade what the exit code and Slurm's state of the job say: a kind, and never a rank."""
    kind = KIND_OF_STATE.get(state, "unknown")
    rank = "right" if truth.node is None and kind in failure.kinds else "unknown"
    return Grades("right" if kind in failure.kinds else "wrong", rank, "unknown")


def last_traceback(texts: Sequence[tuple[str, str]]) -> tuple[str, int | None]:
    """Return the last line of the last traceback in the newest of these files, and the rank in front of it."""
    for name, text in texts:
        lines = text.splitlines()
        starts = [number for number, line in enumerate(lines) if TRACEBACK.search(line)]
        ends = [line for line in lines[starts[-1] + 1 :] if LAST_LINE.search(line)] if starts else []
        if ends:
            label = LABEL.search(lines[starts[-1]]) or LABEL.search(ends[0])
            of_file = re.search(r"rank[-_.]?(\d+)", name)
            found = next((each for each in label.groups() if each), None) if label else of_file and of_file[1]
            return LAST_LINE.search(ends[0])[1], int(found) if found else None  # type: ignore[index]
    return "", None


def judge_traceback(failure: LaunchFailure, truth: Truth, quoted: str, rank: int | None) -> Grades:
    """Grade what a person concludes from the last traceback: its exception is the cause, its rank failed first."""
    if not quoted:
        return NOT_SAID
    is_cause = failure.whose in ("rank", "ranks of a node") and not CONSEQUENCES.search(quoted)
    if rank is None:
        return Grades("right" if is_cause else "wrong", "unknown", "unknown")
    return Grades("right" if is_cause else "wrong", "right" if rank in truth.ranks else "wrong", "unknown")
