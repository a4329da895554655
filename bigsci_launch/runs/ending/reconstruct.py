"""Works out why an attempt ended from what its ranks left, if its batch host was lost and wrote no exit.json.

What judges is what would have judged on the batch host, but nothing is written. What Slurm knows takes
the place of what the script saw. Its exit code is not known, unless a rank's own is the training's.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.ending.job_output import start_time
from bigsci_launch.runs.ending.reason import SeenEnd, describe
from bigsci_launch.runs.layout import AttemptDir, rank_files, read_record
from bigsci_launch.scheduler.job import JobInfo, JobState, NodeInfo

MAX_NODES_NAMED = 4
_TERMINATED = frozenset({JobState.CANCELLED, JobState.TIMEOUT})
_JUDGED = _TERMINATED | {JobState.COMPLETED, JobState.FAILED, JobState.NODE_FAIL, JobState.OUT_OF_MEMORY}
_UNPROVEN = ("crashed", "launch_failed")
"""Reasons that need a rank or a cause: without one, they only say that the exit code was not 0."""


def reconstruct_exit(
    attempt: AttemptDir, job: JobInfo, world_size: int, nodes: Sequence[NodeInfo] = ()
) -> dict[str, Any] | None:
    """Return what exit.json would say about an attempt that is over; None if the records do not show it.

    `nodes` are those that Slurm cannot reach now. One counts as lost if its ranks left no record of their end.
    """
    started, silent = _started(attempt), _silent_nodes(attempt)
    if started is None or not (job.state in _JUDGED or job.state is JobState.UNKNOWN):
        return None
    lost = [node for node in nodes if node.name in silent]
    document = _describe(_seen(attempt, job, world_size, started, lost))
    if document is None or (document["reason"] in _UNPROVEN and not (document["first_failure"] or document["cause"])):
        return None
    if document["reason"] == "unknown" and not document["evidence"]:
        return None
    named = [f"sinfo reports {node.name} as {node.raw_state}: {node.reason or 'no reason'}" for node in lost]
    if document["reason"] == "node_failure" and document["first_failure"] is None:
        named.append("unknown which node was lost")
    return {
        **document,
        "exit_code": _known_code(document, job),
        "evidence": [*named[:MAX_NODES_NAMED], *document["evidence"]],
        "job_id": job.job_id or None,
        "ended": job.ends if job.state.is_over else None,
        "reconstructed": {"source": "records", "host": socket.gethostname()},
    }


def _seen(attempt: AttemptDir, job: JobInfo, world_size: int, started: float, lost: Sequence[NodeInfo]) -> SeenEnd:
    """Return what the batch script would have seen."""
    end = SeenEnd(attempt, world_size, started, exit_code=1)
    if job.state is JobState.COMPLETED:
        return replace(end, exit_code=0)
    if job.state in _TERMINATED:
        reason = "TimeLimit" if job.state is JobState.TIMEOUT else job.reason
        return replace(end, exit_code=143, terminated=job.ends or 0.0, slurm_reason=reason)
    if job.state is JobState.NODE_FAIL:
        return replace(end, slurm_reason="NodeDown", lost_nodes=tuple(node.name for node in lost))
    if job.state in _JUDGED:
        return end
    ended_well = sum(read_record(path).get("code") == 0 for path in rank_files(attempt.exits, ".json").values())
    return replace(end, exit_code=0 if ended_well == world_size else 1)


def _describe(end: SeenEnd) -> dict[str, Any] | None:
    """Return the record; None if those of the ranks are damaged, whatever is in them."""
    try:
        return describe(end)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RunDirError):
        return None


def _known_code(document: dict[str, Any], job: JobInfo) -> int | None:
    if job.state is JobState.COMPLETED or document["reason"] == "finished":
        return 0
    failure = document["first_failure"] or {}
    has_own = failure.get("signal") is not None or failure.get("code") is not None
    return document["exit_code"] if has_own and document["reason"] != "left_early" else None


def _started(attempt: AttemptDir) -> float | None:
    """Return when the attempt started, in seconds since the epoch; None if nothing of it ever did."""
    if (started := start_time(attempt)) is not None:
        return started
    starts = [read_record(path).get("started") for path in rank_files(attempt.pids, ".json").values()]
    return min((start for start in starts if start is not None), default=None)


def _silent_nodes(attempt: AttemptDir) -> set[str]:
    """Return the nodes on which a rank started that left no exit record."""
    ended = rank_files(attempt.exits, ".json")
    started = {rank: read_record(path).get("node") for rank, path in rank_files(attempt.pids, ".json").items()}
    return {str(node) for rank, node in started.items() if node and rank not in ended}
