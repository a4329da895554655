"""The JSON documents of `bsl status`. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bigsci_launch.runs.generations.strangers import strangers_document
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.scheduler.waiting import meaning_of
from bigsci_launch.status.generations import generations_document
from bigsci_launch.status.next import next_document
from bigsci_launch.status.read import RunStatus, total_steps
from bigsci_launch.status.sections import restart_document, watching_document
from bigsci_launch.units import age_s

SCHEMA_VERSION = 1


def status_document(status: RunStatus) -> dict[str, Any]:
    """Return the JSON document of `bsl status`. Times are seconds since the epoch; ages and durations are seconds.

    An age is null where a clock is known to differ.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {"name": status.run.name, "directory": str(status.run.path)},
        "attempt": {"name": status.attempt.name, "directory": str(status.attempt.path), "count": status.num_attempts},
        "scheduler": status.record.scheduler if status.record else None,
        "pid": status.record.launcher.pid if status.record and status.record.launcher else None,
        "job": job_document(status.job),
        "topology": status.topology.as_dict() if status.topology else None,
        "world_size": status.topology.world_size if status.topology else None,
        "pipelines": status.pipelines,
        "num_ranks_started": status.num_started,
        "step": _step_document(status),
        "slowest_rank": _slowest_document(status),
        "checkpoint": _checkpoint_document(status),
        "refused_saves": asdict(status.refused_saves) if status.refused_saves else None,
        "restart": restart_document(status.restart),
        "last_output": _output_document(status),
        "lost_nodes": [asdict(each.node) for each in status.unreachable_nodes if each.fate == "lost"],
        "unreachable_nodes": [
            {"name": each.node.name, "raw_state": each.node.raw_state, "fate": each.fate, "sign_age_s": each.sign_age_s}
            for each in status.unreachable_nodes
        ],
        "generations": generations_document(status.generations, status.recorded_steps, status.asked),
        "strangers": strangers_document(status.strangers),
        "micro_batch": asdict(status.found_size) if status.found_size else None,
        "exit": status.exit,
        "cancelled_by": status.cancelled_by,
        "next": next_document(status),
        "watching": watching_document(status.watching, status.asked, may_run=not status.job.state.is_over),
    }


def job_document(job: JobInfo) -> dict[str, Any]:
    """Return what is known about a job; `job_id` is a PID for a local attempt."""
    return {
        "job_id": job.job_id or None,
        "state": job.state.value,
        "raw_state": job.raw_state,
        "source": job.source,
        "reason": job.reason or None,
        "meaning": meaning_of(job),
        "name": job.name or None,
        "user": job.user or None,
        "partition": job.partition or None,
        "num_nodes": job.num_nodes,
        "hostlist": job.hostlist or None,
        "cluster": job.cluster or None,
        "submitted": job.submitted,
        "expected_start": job.expected_start,
        "started": None if job.state.is_queued else job.started,
        "ends": job.ends,
        "elapsed_s": job.elapsed_s,
    }


def foreign_job_document(job: JobInfo) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "run": None, "job": job_document(job)}


def _step_document(status: RunStatus) -> dict[str, Any] | None:
    if status.last_step is None:
        return None
    total = total_steps(status.record, status.last_step)
    age = None if status.last_step.clock_differs else age_s(status.last_step.time, status.asked)
    return {**asdict(status.last_step), "total_steps": total, "age_s": age}


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
        "heartbeat_age_s": None if slow.clock_differs else age_s(slow.time, status.asked),
        "output_age_s": None if slow.printed is None else age_s(slow.printed, status.asked),
    }


def _output_document(status: RunStatus) -> dict[str, Any] | None:
    last = status.last_output
    if last is None:
        return None
    return {"rank": last.sign.rank if last.sign else None, "age_s": age_s(last.time, status.asked)}


def _checkpoint_document(status: RunStatus) -> dict[str, Any] | None:
    saved = status.checkpoint
    return None if saved is None else {"path": str(saved.path), "age_s": age_s(saved.time, status.asked)}
