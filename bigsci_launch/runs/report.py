"""The output of `bsl status` and `bsl list`: plain lines and JSON documents from the values of `status`. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.signs import LastOutput, RankSign, UnreachableNode
from bigsci_launch.runs.status import RunStatus, RunSummary, total_steps
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.waiting import advice_for, meaning_of
from bigsci_launch.topology import Coordinate
from bigsci_launch.units import format_age, format_slurm_duration

SCHEMA_VERSION = 1
SILENT_AFTER_S = 120.0
"""If the newest sign of life is older than this, and than three steps, `bsl status` suggests `bsl spy`."""


def status_lines(status: RunStatus) -> list[str]:
    """Return the status as lines `name   value`, followed by what to do next."""
    submitted = status.record.submitted if status.record else None
    waiting = _waiting(status.job, submitted, status.asked)
    facts = [*_identity(status), *waiting, *_progress(status), *_ranks(status), *_ending(status)]
    width = max(len(name) for name, _ in facts)
    return [f"{name:<{width}}  {value}" for name, value in facts] + _advice(status)


def job_lines(job: JobInfo, asked: float) -> list[str]:
    """Return only what Slurm knew at `asked` (seconds since the epoch), for a job that `bsl` did not submit."""
    facts = [("job", f"{job.job_id} ({job.name or 'unnamed'}), not submitted by bsl"), *_job_facts(job)]
    facts += _waiting(job, job.submitted, asked)
    width = max(len(name) for name, _ in facts)
    advice = advice_for(job, None)
    return [f"{name:<{width}}  {value}" for name, value in facts] + ([f"next: {advice}"] if advice else [])


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


def _waiting(job: JobInfo, submitted: float | None, asked: float) -> list[tuple[str, str]]:
    """Why a job waits, since when, and when Slurm expects to start it."""
    if not job.state.is_queued:
        return []
    since = job.submitted or submitted
    facts = [("waits because", meaning)] if (meaning := meaning_of(job)) else []
    if since is not None:
        facts.append(("waits for", f"{format_age(max(0.0, asked - since))}, since {_clock(since)}"))
    expected = job.expected_start
    if expected is None:
        start = "Slurm has no estimate"
    elif expected <= asked:
        start = "Slurm expects it at any moment"
    else:
        start = f"{_clock(expected)}, in {format_age(expected - asked)}; Slurm's estimate"
    return [*facts, ("start", start)]


def _clock(moment: float) -> str:
    """A moment as people of this machine write it."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def _progress(status: RunStatus) -> list[tuple[str, str]]:
    facts = []
    if (last := status.last_step) is not None:
        total = total_steps(status.record, last)
        parts = [
            f"{last.seconds:.3g} s per step" if last.seconds is not None else "",
            f"{last.tflops:.3g} TFLOP/s per rank" if last.tflops is not None else "",
            f"loss {last.loss:.6g}" if last.loss is not None else "",
            f"{format_age(max(0.0, status.asked - last.time))} ago" if not status.job.state.is_over else "",
        ]
        step = f"{last.step}/{total}" if total else f"{last.step}"
        facts.append(("step", ", ".join([step, *(part for part in parts if part)])))
    if (saved := status.checkpoint) is not None:
        facts.append(("checkpoint", f"{saved.path.name}, {format_age(max(0.0, status.asked - saved.time))} ago"))
    return facts


def _may_run(status: RunStatus) -> bool:
    """Whether the ranks run, as far as is known: a job whose state is unknown may."""
    return not status.job.state.is_over and not status.job.state.is_queued and not status.job.is_gone


def _ranks(status: RunStatus) -> list[tuple[str, str]]:
    facts = []
    if _may_run(status) and status.topology:
        facts.append(("ranks", f"{status.num_started} of {status.topology.world_size} started"))
        if status.slowest is not None:
            facts.append(("slowest", slowest_text(status.slowest, status.asked)))
        elif status.last_output is not None:
            facts.append(("last output", output_text(status.last_output, status.asked)))
    return [
        *facts,
        *(("lost node" if each.fate == "lost" else "node", node_text(each)) for each in status.unreachable_nodes),
    ]


def output_text(last: LastOutput, asked: float) -> str:
    """Return who printed last, and how long ago: for programs that write no heartbeats."""
    who = "the batch script"
    if (sign := last.sign) is not None:
        who = f"rank {sign.rank} ({sign.coordinate}) on {sign.node}"
    return f"{who}, {format_age(max(0.0, asked - last.time))} ago"


def node_text(unreachable: UnreachableNode) -> str:
    """Return what is known about a node that does not answer Slurm."""
    node = unreachable.node
    said = f"{node.name} does not respond ({node.raw_state}) {node.reason}".rstrip()
    age = None if unreachable.sign_age_s is None else format_age(unreachable.sign_age_s)
    if unreachable.fate == "alive":
        return f"{said}: only its slurmd, since a rank on it gave a sign of life {age} ago"
    signs = "its ranks left no sign of life" if age is None else f"newest sign of life of its ranks {age} ago"
    if unreachable.fate == "lost":
        return f"{said}; {signs}" + ("; Slurm has given it up" if node.is_given_up else "")
    may_be_usual = "" if age is None else ", but they may print nothing"
    return f"{said}; {signs}{may_be_usual}: unknown if it is lost"


def slowest_text(slow: RankSign, asked: float) -> str:
    """Return who the slowest rank is, and for how long it has been silent."""
    age = format_age(max(0.0, asked - slow.time))
    who = f"rank {slow.rank} ({slow.coordinate}) on {slow.node}"
    if slow.phase is None:
        return f"{who}: no heartbeat since it started {age} ago"
    at = f" at step {slow.step}" if slow.step is not None else ""
    printed = ""
    if slow.printed is not None and asked - slow.time > SILENT_AFTER_S:
        printed = f"; its newest output {format_age(max(0.0, asked - slow.printed))} ago"
    return f"{who}: newest heartbeat {age} ago, in {slow.phase}{at}{printed}"


def _ending(status: RunStatus) -> list[tuple[str, str]]:
    if status.job.state.is_active or (status.exit is None and not _is_known_to_have_ended(status)):
        return []
    if status.exit is None:
        return [("ended", "no exit.json: the batch host died, or the script was killed before it could write one")]
    code = status.exit.get("exit_code")
    ended = [("ended", f"{status.exit['reason']}" + (f", exit code {code}" if code is not None else ""))]
    if (failure := status.exit.get("first_failure")) is not None:
        ended.append(("first failure", failure_text(failure)))
    return ended


def _is_known_to_have_ended(status: RunStatus) -> bool:
    """A job that Slurm no longer knows has ended. One about which it gave no answer may still run."""
    return status.job.state.is_over or status.job.is_gone


def failure_text(failure: dict[str, Any]) -> str:
    """`rank 3 (dp1 pp0 tp1) on n2: SIGKILL`."""
    at = failure.get("coordinate")
    coordinate = f" ({Coordinate.at(**at)})" if at else ""
    how = failure.get("error") or failure.get("signal") or f"exit code {failure.get('code')}"
    return f"rank {failure.get('rank')}{coordinate} on {failure.get('node')}: {how}"


def _advice(status: RunStatus) -> list[str]:
    run = run_argument(status.run)
    if status.unreachable_nodes:
        return [f"next: {_node_advice(status, run)}"]
    if advice := advice_for(status.job, run):
        return [f"next: {advice}"]
    failure = (status.exit or {}).get("first_failure")
    if failure is not None and not status.job.state.is_active:
        return [f"next: bsl logs {run} --rank {failure.get('rank')}"]
    silence = silence_s(status)
    if status.job.state is JobState.RUNNING and silence is not None and silence > silent_after_s(status):
        who = "no rank should be silent" if status.slowest else "nothing was printed"
        return [f"next: bsl spy {run}   ({who} for that long)"]
    return []


def _node_advice(status: RunStatus, run: str) -> str:
    """What to do about nodes that do not answer Slurm. Only a lost node is left out of the next attempt."""
    lost = [each.node.name for each in status.unreachable_nodes if each.fate == "lost"]
    if not lost:
        return f"wait, and ask again: bsl status {run}   (Slurm ends the job by itself if it gives the node up)"
    if status.record is not None and status.record.requeue:
        return f"wait: Slurm requeues the job by itself when it gives the node up   (bsl status {run})"
    return f"bsl cancel {run}; then submit it again with --set slurm.exclude={','.join(lost)}"


def silence_s(status: RunStatus) -> float | None:
    """Return for how long the slowest rank has been silent; for a program without heartbeats, all of them. In seconds.

    None if nothing is known about the ranks, or if none has started.
    """
    if status.slowest is not None:
        return status.asked - status.slowest.newest
    if status.last_output is None or status.num_started == 0:
        return None
    return status.asked - status.last_output.time


def silent_after_s(status: RunStatus) -> float:
    """Return how many seconds of silence are too long: two minutes, or the time of three steps if that is longer."""
    last = status.last_step
    usual = max(last.every_s or 0.0, last.seconds or 0.0) if last is not None else 0.0
    return max(SILENT_AFTER_S, 3 * usual)


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
        "last_output": _output_document(status),
        "lost_nodes": [asdict(each.node) for each in status.unreachable_nodes if each.fate == "lost"],
        "unreachable_nodes": [
            {"name": each.node.name, "raw_state": each.node.raw_state, "fate": each.fate, "sign_age_s": each.sign_age_s}
            for each in status.unreachable_nodes
        ],
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
    """Return the JSON document of `bsl status --jobid` for a job that `bsl` did not submit."""
    return {"schema_version": SCHEMA_VERSION, "run": None, "job": job_document(job)}


def _step_document(status: RunStatus) -> dict[str, Any] | None:
    if status.last_step is None:
        return None
    total = total_steps(status.record, status.last_step)
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
        "output_age_s": None if slow.printed is None else max(0.0, status.asked - slow.printed),
    }


def _output_document(status: RunStatus) -> dict[str, Any] | None:
    last = status.last_output
    if last is None:
        return None
    return {"rank": last.sign.rank if last.sign else None, "age_s": max(0.0, status.asked - last.time)}


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
