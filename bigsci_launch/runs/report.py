"""The output of `bsl status` and `bsl list`: plain lines and JSON documents from the values of `status`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.status import RankSign, RunStatus, RunSummary
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.topology import Coordinate
from bigsci_launch.units import format_age, format_slurm_duration

SCHEMA_VERSION = 1
SILENT_AFTER_S = 120.0
"""If the newest heartbeat of the slowest rank is older than this, `bsl status` suggests `bsl spy`."""


def status_lines(status: RunStatus) -> list[str]:
    """Return the status as lines `name   value`, followed by what to do next."""
    facts = [*_identity(status), *_progress(status), *_ranks(status), *_ending(status)]
    width = max(len(name) for name, _ in facts)
    return [f"{name:<{width}}  {value}" for name, value in facts] + _advice(status)


def job_lines(job: JobInfo) -> list[str]:
    """Return only what Slurm knows, for a job that `bsl` did not submit."""
    facts = [("job", f"{job.job_id} ({job.name or 'unnamed'}), not submitted by bsl"), *_job_facts(job)]
    width = max(len(name) for name, _ in facts)
    return [f"{name:<{width}}  {value}" for name, value in facts]


def _identity(status: RunStatus) -> list[tuple[str, str]]:
    label = status.record.label if status.record else "no job"
    axes = f", {status.topology.world_size} ranks ({status.topology})" if status.topology else ""
    return [
        ("run", f"{status.run.name}  {status.run.path}"),
        ("attempt", f"{status.attempt.name} of {status.num_attempts}, {label}{axes}"),
        *_job_facts(status.job),
    ]


def _job_facts(job: JobInfo) -> list[tuple[str, str]]:
    said = f" ({job.reason})" if job.reason else ""
    source = "" if job.source == "none" else f", says {job.source}"
    facts = [("state", f"{job.state.value}{said}{source}")]
    if job.hostlist:
        facts.append(("nodes", f"{job.num_nodes or len(expand_hostlist(job.hostlist))}: {job.hostlist}"))
    if job.elapsed_s is not None and job.state.is_active and not job.state.is_queued:
        facts.append(("runs for", format_slurm_duration(job.elapsed_s)))
    return facts


def _progress(status: RunStatus) -> list[tuple[str, str]]:
    facts = []
    if (last := status.last_step) is not None:
        total = f"/{status.record.total_steps}" if status.record and status.record.total_steps else ""
        parts = [
            f"{last.seconds:.3g} s per step" if last.seconds is not None else "",
            f"{last.tflops:.3g} TFLOP/s per rank" if last.tflops is not None else "",
            f"loss {last.loss:.6g}" if last.loss is not None else "",
        ]
        facts.append(("step", ", ".join([f"{last.step}{total}", *(part for part in parts if part)])))
    if (saved := status.checkpoint) is not None:
        facts.append(("checkpoint", f"{saved.path.name}, {format_age(max(0.0, status.asked - saved.time))} ago"))
    return facts


def _ranks(status: RunStatus) -> list[tuple[str, str]]:
    facts = []
    if status.job.state.is_active and status.topology and not status.job.state.is_queued:
        facts.append(("ranks", f"{status.num_started} of {status.topology.world_size} started"))
        if status.slowest is not None:
            facts.append(("slowest", slowest_text(status.slowest, status.asked)))
    for node in status.lost_nodes:
        facts.append(("lost node", f"{node.name} does not respond ({node.raw_state}) {node.reason}".rstrip()))
    return facts


def slowest_text(slow: RankSign, asked: float) -> str:
    """Return who the slowest rank is, and for how long it has been silent."""
    age = format_age(max(0.0, asked - slow.time))
    who = f"rank {slow.rank} ({slow.coordinate}) on {slow.node}"
    if slow.phase is None:
        return f"{who}: no heartbeat since it started {age} ago"
    at = f" at step {slow.step}" if slow.step is not None else ""
    return f"{who}: newest heartbeat {age} ago, in {slow.phase}{at}"


def _ending(status: RunStatus) -> list[tuple[str, str]]:
    if status.job.state.is_active:
        return []
    if status.exit is None:
        return [("ended", "no exit.json: the batch host died, or the script was killed before it could write one")]
    code = status.exit.get("exit_code")
    ended = [("ended", f"{status.exit['reason']}" + (f", exit code {code}" if code is not None else ""))]
    if (failure := status.exit.get("first_failure")) is not None:
        ended.append(("first failure", failure_text(failure)))
    return ended


def failure_text(failure: dict[str, Any]) -> str:
    """`rank 3 (dp1 pp0 tp1) on n2: SIGKILL`."""
    at = failure.get("coordinate")
    coordinate = f" ({Coordinate.at(**at)})" if at else ""
    how = failure.get("error") or failure.get("signal") or f"exit code {failure.get('code')}"
    return f"rank {failure.get('rank')}{coordinate} on {failure.get('node')}: {how}"


def _advice(status: RunStatus) -> list[str]:
    run = run_argument(status.run)
    if status.lost_nodes:
        return [f"next: bsl cancel {run}; then submit it again with --set slurm.exclude={status.lost_nodes[0].name}"]
    failure = (status.exit or {}).get("first_failure")
    if failure is not None and not status.job.state.is_active:
        return [f"next: bsl logs {run} --rank {failure.get('rank')}"]
    is_running = status.job.state is JobState.RUNNING
    if is_running and status.slowest and status.asked - status.slowest.time > SILENT_AFTER_S:
        return [f"next: bsl spy {run}   (no rank should be silent for that long)"]
    return []


def status_document(status: RunStatus) -> dict[str, Any]:
    """Return the JSON document of `bsl status`. Times are seconds since the epoch; ages and durations are seconds."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {"name": status.run.name, "directory": str(status.run.path)},
        "attempt": {"name": status.attempt.name, "directory": str(status.attempt.path), "count": status.num_attempts},
        "scheduler": status.record.scheduler if status.record else None,
        "pid": status.record.launcher.pid if status.record and status.record.launcher else None,
        "job": job_document(status.job),
        "topology": status.topology.as_dict() if status.topology else None,
        "world_size": status.topology.world_size if status.topology else None,
        "num_ranks_started": status.num_started,
        "step": _step_document(status),
        "slowest_rank": _slowest_document(status),
        "checkpoint": _checkpoint_document(status),
        "lost_nodes": [asdict(node) for node in status.lost_nodes],
        "exit": status.exit,
    }


def job_document(job: JobInfo) -> dict[str, Any]:
    """Return what is known about a job; `job_id` is a PID for a local attempt."""
    return {
        "job_id": job.job_id or None,
        "state": job.state.value,
        "raw_state": job.raw_state,
        "source": job.source,
        "reason": job.reason or None,
        "name": job.name or None,
        "user": job.user or None,
        "partition": job.partition or None,
        "num_nodes": job.num_nodes,
        "hostlist": job.hostlist or None,
        "started": job.started,
        "ends": job.ends,
        "elapsed_s": job.elapsed_s,
    }


def foreign_job_document(job: JobInfo) -> dict[str, Any]:
    """Return the JSON document of `bsl status --jobid` for a job that `bsl` did not submit."""
    return {"schema_version": SCHEMA_VERSION, "run": None, "job": job_document(job)}


def _step_document(status: RunStatus) -> dict[str, Any] | None:
    if status.last_step is None:
        return None
    total = status.record.total_steps if status.record else None
    return {**asdict(status.last_step), "total_steps": total, "age_s": status.asked - status.last_step.time}


def _slowest_document(status: RunStatus) -> dict[str, Any] | None:
    slow = status.slowest
    if slow is None:
        return None
    return {
        "rank": slow.rank,
        "node": slow.node,
        "coordinate": slow.coordinate,
        "phase": slow.phase,
        "step": slow.step,
        "heartbeat_age_s": max(0.0, status.asked - slow.time),
    }


def _checkpoint_document(status: RunStatus) -> dict[str, Any] | None:
    saved = status.checkpoint
    return None if saved is None else {"path": str(saved.path), "age_s": max(0.0, status.asked - saved.time)}


LIST_COLUMNS = ("run", "state", "attempt", ">step", "job", ">last sign", "directory")


def list_rows(summaries: Sequence[RunSummary], now: float) -> list[list[str]]:
    """Return the rows of `bsl list` under `LIST_COLUMNS`."""
    return [_list_row(summary, now) for summary in summaries]


def _list_row(summary: RunSummary, now: float) -> list[str]:
    if summary.problem:
        return [summary.run.name, "?", summary.attempt, "", summary.problem, "", _from_here(summary.run.path)]
    total = f"/{summary.total_steps}" if summary.total_steps else ""
    step = f"{summary.step}{total}" if summary.step is not None else "-"
    age = format_age(max(0.0, now - summary.last_sign)) if summary.last_sign else "-"
    state = summary.state.value
    return [summary.run.name, state, summary.attempt, step, summary.label, age, _from_here(summary.run.path)]


def _from_here(path: Path) -> str:
    """Return the path as a person types it: relative if it is below the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def list_document(summaries: Sequence[RunSummary], root: str) -> dict[str, Any]:
    """Return the JSON document of `bsl list`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "root": root,
        "runs": [
            {
                "name": summary.run.name,
                "directory": str(summary.run.path),
                "attempt": summary.attempt or None,
                "state": summary.state.value,
                "job": summary.label or None,
                "step": summary.step,
                "total_steps": summary.total_steps,
                "last_sign": summary.last_sign,
                "problem": summary.problem or None,
            }
            for summary in summaries
        ],
    }
