"""What a run is doing: its job, its progress, which rank is slowest, and why an attempt ended.

The sources are the run directory and one query to Slurm. Ranks are judged only by their own records: the slowest rank
is the one whose newest record is the oldest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.errors import RunDirError, SlurmError
from bigsci_launch.runs.attempts import JobRecord, ask_about, attempt_state, query_attempt, read_exit, read_job
from bigsci_launch.runs.checkpoints import CheckpointsDir
from bigsci_launch.runs.events import read_last_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, find_runs, rank_files, read_json
from bigsci_launch.scheduler.job import JobInfo, JobState, NodeInfo
from bigsci_launch.scheduler.slurm import query_nodes
from bigsci_launch.topology import Coordinate, Topology

EVENT_TAIL_BYTES = 16384


@dataclass(frozen=True, slots=True)
class RankSign:
    """The newest sign of life of a rank: when (seconds since the epoch), in which phase, at which step.

    `phase` is None for a rank that has written nothing; `time` is then its start.
    """

    rank: int
    node: str
    coordinate: str
    time: float
    phase: str | None
    step: int | None
    has_ended: bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The newest optimizer step that a rank has reported. Times in seconds."""

    step: int
    time: float
    seconds: float | None
    tflops: float | None
    loss: float | None
    consumed_samples: int | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The newest complete checkpoint. `time` is when it was finished, in seconds since the epoch."""

    path: Path
    time: float


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Everything known at `asked` (seconds since the epoch) about a run and its newest attempt."""

    run: RunDir
    asked: float
    attempt: AttemptDir
    num_attempts: int
    record: JobRecord | None
    job: JobInfo
    topology: Topology | None
    num_started: int
    slowest: RankSign | None
    last_step: StepRecord | None
    checkpoint: Checkpoint | None
    exit: dict[str, Any] | None
    lost_nodes: tuple[NodeInfo, ...]


def read_status(run: RunDir) -> RunStatus:
    """Return the status of the run's newest attempt.

    Raises:
        RunDirError: the run has no attempt, or its records cannot be read.
    """
    attempt = run.latest_attempt()
    if attempt is None:
        raise RunDirError(f"{run.path}: nothing has been submitted yet", hint="`bsl submit CONFIG` submits a run")
    job = query_attempt(attempt)
    events = read_rank_events(attempt)
    signs = read_signs(attempt, events)
    return RunStatus(
        run=run,
        asked=time.time(),
        attempt=attempt,
        num_attempts=len(run.attempts()),
        record=read_job(attempt),
        job=job,
        topology=read_topology(run),
        num_started=len(signs),
        slowest=find_slowest(signs),
        last_step=find_last_step(events.values()),
        checkpoint=find_last_checkpoint(run),
        exit=read_exit(attempt),
        lost_nodes=find_lost_nodes(job),
    )


def read_topology(run: RunDir) -> Topology | None:
    """Return the topology in `run.json`; None if it has none."""
    document = read_json(run.record)
    try:
        return Topology(**document["topology"])
    except (KeyError, TypeError, ValueError):
        return None


def read_rank_events(attempt: AttemptDir) -> dict[int, list[dict[str, Any]]]:
    """Return the newest records of every rank that has written any, oldest first."""
    files = rank_files(attempt.events, ".jsonl")
    return {rank: read_last_events(path, EVENT_TAIL_BYTES) for rank, path in files.items()}


def read_signs(attempt: AttemptDir, events: dict[int, list[dict[str, Any]]]) -> list[RankSign]:
    """Return the newest sign of life of every started rank; its start, if it has written nothing."""
    signs = []
    for rank, path in rank_files(attempt.pids, ".json").items():
        try:
            signs.append(_sign(read_json(path), events.get(rank, [])))
        except (RunDirError, KeyError, TypeError, ValueError):
            continue  # it is being written right now
    return signs


def _sign(identity: dict[str, Any], events: list[dict[str, Any]]) -> RankSign:
    at = identity["coordinate"]
    last = events[-1] if events else {}
    phases = [event["phase"] for event in events if event.get("kind") == "heartbeat" and "phase" in event]
    return RankSign(
        rank=identity["rank"],
        node=identity["node"],
        coordinate=str(Coordinate.at(**at)),
        time=last.get("time") or identity["started"],
        phase=phases[-1] if phases else None,
        step=last.get("step"),
        has_ended=last.get("kind") == "end",
    )


def find_slowest(signs: Iterable[RankSign]) -> RankSign | None:
    """Return the rank whose newest record is the oldest, among those that have not ended; None if all have."""
    running = [sign for sign in signs if not sign.has_ended]
    return min(running, key=lambda sign: (sign.time, sign.rank), default=None)


def find_last_step(events: Iterable[list[dict[str, Any]]]) -> StepRecord | None:
    """Return the newest `step` record of any rank."""
    records = [event for tail in events for event in tail if event.get("kind") == "step" and event.get("step")]
    if not records:
        return None
    last = max(records, key=lambda event: (event["step"], event["time"]))
    return StepRecord(
        step=last["step"],
        time=last["time"],
        seconds=last.get("seconds"),
        tflops=last.get("tflops"),
        loss=last.get("loss"),
        consumed_samples=last.get("consumed_samples"),
    )


def find_last_checkpoint(run: RunDir) -> Checkpoint | None:
    """Return the checkpoint that `latest` names; None if there is none."""
    folder = CheckpointsDir(run.checkpoints)
    try:
        path = folder.folder(folder.latest.read_text(encoding="utf-8").strip())
        return Checkpoint(path, folder.latest.stat().st_mtime) if path.is_dir() else None
    except OSError:
        return None


def find_lost_nodes(job: JobInfo) -> tuple[NodeInfo, ...]:
    """Return the nodes of a running job that Slurm cannot reach: squeue says RUNNING until the node times out."""
    if job.source != "squeue" or job.state.is_queued or not job.state.is_active or not job.hostlist:
        return ()
    try:
        return tuple(node for node in query_nodes(job.hostlist) if not node.is_responding)
    except SlurmError:
        return ()


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of `bsl list`. `problem` says why the run could not be read; the fields after `run` are then empty."""

    run: RunDir
    attempt: str = ""
    state: JobState = JobState.UNKNOWN
    label: str = ""
    step: int | None = None
    total_steps: int | None = None
    last_sign: float | None = None
    problem: str = ""


def list_runs(root: Path) -> list[RunSummary]:
    """Return every run directly under `root`, the most recently active first. Slurm is asked once for all jobs."""
    opened = [_open(run) for run in find_runs(root)]
    alive = [entry.record.job_id for entry in opened if entry.record and entry.record.job_id and not entry.has_ended]
    jobs, why = ask_about(alive)
    summaries = [_summarize(entry, jobs, why) for entry in opened]
    return sorted(summaries, key=lambda summary: summary.last_sign or 0.0, reverse=True)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A run, its newest attempt and that attempt's job; or the problem with them."""

    run: RunDir
    attempt: AttemptDir | None = None
    record: JobRecord | None = None
    problem: str = ""

    @property
    def has_ended(self) -> bool:
        return self.attempt is not None and _has_ended(self.attempt)


def _open(run: RunDir) -> _Opened:
    try:
        attempt = run.latest_attempt()
        if attempt is None:
            return _Opened(run, problem="nothing has been submitted yet")
        return _Opened(run, attempt, read_job(attempt))
    except RunDirError as error:
        return _Opened(run, problem=error.message)


def _summarize(entry: _Opened, jobs: dict[str, JobInfo], why_unknown: str) -> RunSummary:
    record = entry.record
    if entry.attempt is None:
        return RunSummary(entry.run, problem=entry.problem)
    events = read_rank_events(entry.attempt)
    last_step = find_last_step(events.values())
    times = [tail[-1]["time"] for tail in events.values() if tail and "time" in tail[-1]]
    return RunSummary(
        entry.run,
        entry.attempt.name,
        attempt_state(entry.attempt, record, jobs, why_unknown).state,
        record.label if record else "",
        last_step.step if last_step else None,
        record.total_steps if record else None,
        max(times, default=record.submitted if record else None),
    )


def _has_ended(attempt: AttemptDir) -> bool:
    ended = read_exit(attempt)
    return ended is not None and ended.get("exit_code") is not None and ended["reason"] != "requeued"
