"""What a run is doing: its job, its progress, which rank is slowest, and why an attempt ended.

The sources are the run directory and one query to Slurm. Ranks are judged only by their own signs of life: the slowest
rank is the one whose newest record is the oldest. Where Slurm does not answer, the run directory still does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.checkpoints.folder import CheckpointsDir
from bigsci_launch.checkpoints.found_size import FoundSize, read_found_size
from bigsci_launch.checkpoints.refused_saves import RefusedSaves, read_refused_saves
from bigsci_launch.checkpoints.restart import Restart, find_restart
from bigsci_launch.checkpoints.resume import NextStart, find_next_start
from bigsci_launch.errors import RunDirError, SlurmError
from bigsci_launch.procfs import user_name
from bigsci_launch.runs.attempts import (
    STATE_OF_REASON,
    JobRecord,
    SlurmAnswer,
    ask_about,
    attempt_state,
    find_job,
    query_attempt,
    read_exit,
)
from bigsci_launch.runs.chain.carry import Carry, read_carry
from bigsci_launch.runs.chain.records import read_next
from bigsci_launch.runs.ending.reconstruct import reconstruct_exit
from bigsci_launch.runs.find import find_attempt
from bigsci_launch.runs.generations.read import present_layout, present_topology, read_generations
from bigsci_launch.runs.generations.records import Generations
from bigsci_launch.runs.generations.samples import RecordedStep, read_recorded_steps
from bigsci_launch.runs.generations.strangers import NO_STRANGERS, Strangers, read_strangers
from bigsci_launch.runs.layout import AttemptDir, RunDir, find_runs
from bigsci_launch.runs.signs import (
    LastOutput,
    RankSign,
    StepRecord,
    UnreachableNode,
    find_last_output,
    find_last_step,
    find_slowest,
    judge_node,
    read_rank_events,
    read_signs,
)
from bigsci_launch.runs.watching.read import UNWATCHED, Watching, read_watching
from bigsci_launch.scheduler.job import JobInfo, JobState, NodeInfo
from bigsci_launch.scheduler.slurm import query_canceller, query_nodes
from bigsci_launch.topology import Topology


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
    last_output: LastOutput | None
    last_step: StepRecord | None
    checkpoint: Checkpoint | None
    exit: dict[str, Any] | None
    unreachable_nodes: tuple[UnreachableNode, ...]
    carry: Carry
    cancelled_by: str | None = None
    """Who cancelled the job; None if it was not cancelled, or if Slurm does not say."""
    restart: Restart | None = None
    """How the attempt continued the run; None if it began at step 1, or if nothing shows where it began."""
    watching: Watching = UNWATCHED
    generations: Generations | None = None
    pipelines: Mapping[str, Any] | None = None
    """The record of the pipelines that train now, of different depths; None for any other run."""
    """Those of an attempt with `survive`; `topology` and the ranks are then those of the newest."""
    recorded_steps: tuple[RecordedStep, ...] = ()
    """The newest steps with their samples, where there was more than one generation."""
    strangers: Strangers = NO_STRANGERS
    next_start: NextStart = "unknown"
    """Where the next attempt would begin; looked up once this one has ended."""
    found_size: FoundSize | None = None
    """The size of micro-batches that the run has found, with `training.micro_batch_size: auto`."""
    refused_saves: RefusedSaves | None = None
    """Saves that the disk has refused since the newest checkpoint."""

    @property
    def has_started(self) -> bool:
        """Whether anything of the newest attempt has run: a job that waits after that waits for another start."""
        return self.exit is not None or self.num_started > 0


def read_status(run: RunDir, name: str | None = None) -> RunStatus:
    """Return the status of the run's newest attempt, or of the one called `name`.

    Raises:
        RunDirError: the run has no such attempt, or its records cannot be read.
    """
    attempt = find_attempt(run, name)
    generations = read_generations(attempt)
    job, topology = query_attempt(attempt), present_topology(run, attempt, generations)
    events = read_rank_events(attempt)
    signs = read_signs(attempt, events)
    ended = read_exit(attempt) or reconstructed_exit(run, attempt, job, topology)
    unreachable = find_unreachable_nodes(job, signs)
    used = [each for each in unreachable if generations is None or generations.needs(each.node.name)]
    return RunStatus(
        run=run,
        asked=time.time(),
        attempt=attempt,
        num_attempts=len(run.attempts()),
        record=_known_job(attempt),
        job=job,
        topology=topology,
        num_started=len(signs),
        slowest=find_slowest(signs),
        last_output=find_last_output(attempt, signs),
        last_step=find_last_step(attempt, events),
        checkpoint=find_last_checkpoint(run),
        exit=ended,
        unreachable_nodes=tuple(used),
        cancelled_by=_find_canceller(attempt, job),
        carry=read_carry(run, attempt),
        restart=find_restart(run, attempt),
        watching=read_watching(run, attempt, time.time()),
        refused_saves=read_refused_saves(attempt),
        generations=generations,
        pipelines=present_layout(attempt, generations),
        recorded_steps=tuple(read_recorded_steps(attempt)) if generations and len(generations.all) > 1 else (),
        strangers=read_strangers(attempt),
        next_start=find_next_start(run, attempt) if ended is not None or job.is_gone else "unknown",
        found_size=read_found_size(run),
    )


def _known_job(attempt: AttemptDir) -> JobRecord | None:
    with suppress(SlurmError):
        return find_job(attempt)
    return None


def _find_canceller(attempt: AttemptDir, job: JobInfo) -> str | None:
    """Return who cancelled a Slurm job: the accounting knows it, or the mark of `bsl cancel`. None if neither does."""
    if job.state is not JobState.CANCELLED or job.source not in ("squeue", "sacct"):
        return None
    try:
        return query_canceller(job.job_id) or user_name(attempt.cancel_mark.stat().st_uid)
    except OSError:
        return None


def reconstructed_exit(
    run: RunDir, attempt: AttemptDir, job: JobInfo, topology: Topology | None
) -> dict[str, Any] | None:
    """Return why an attempt ended that left no exit.json, from its records; None if it may still run, or if they do
    not show it."""
    starts = [each.name for each in run.attempts() if each.base_name == attempt.base_name]
    was_restarted = attempt.name != starts[-1]
    if topology is None or not (job.state.is_over or job.is_gone or was_restarted):
        return None
    nodes: list[NodeInfo] = []
    if job.state is JobState.NODE_FAIL and job.hostlist:
        with suppress(SlurmError):
            nodes = [node for node in query_nodes(job.hostlist) if not node.is_responding]
    return reconstruct_exit(attempt, job, topology.world_size, nodes)


def find_last_checkpoint(run: RunDir) -> Checkpoint | None:
    """Return the checkpoint that `latest` names; None if there is none."""
    folder = CheckpointsDir(run.checkpoints)
    try:
        path = folder.folder(folder.read_latest())
        return Checkpoint(path, folder.latest.stat().st_mtime) if path.is_dir() else None
    except OSError:
        return None


def find_unreachable_nodes(job: JobInfo, signs: Sequence[RankSign]) -> tuple[UnreachableNode, ...]:
    """Return the nodes of a running job that Slurm cannot reach: squeue reports RUNNING until the node times out."""
    if job.source != "squeue" or job.state.is_queued or not job.state.is_active or not job.hostlist:
        return ()
    asked = time.time()
    try:
        silent = [node for node in query_nodes(job.hostlist) if not node.is_responding]
    except SlurmError:
        return ()
    return tuple(judge_node(node, signs, asked) for node in silent)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of `bsl list`. `problem` is why the run could not be read; the fields after `run` are then empty."""

    run: RunDir
    attempt: str = ""
    state: JobState = JobState.UNKNOWN
    label: str = ""
    step: int | None = None
    total_steps: int | None = None
    last_sign: float | None = None
    problem: str = ""
    is_worked_out: bool = False
    """Whether the state comes from the records of the ranks, because nothing else shows how the attempt ended."""


def list_runs(root: Path) -> list[RunSummary]:
    """Return every run directly under `root`, the most recently active first. Slurm is asked once for all jobs."""
    opened = [_open(run) for run in find_runs(root)]
    answer = ask_about(entry.record for entry in opened if not entry.has_ended)
    summaries = [_summarize(entry, answer) for entry in opened]
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
        return _Opened(run, attempt, _known_job(attempt))
    except RunDirError as error:
        return _Opened(run, problem=error.message)


def _summarize(entry: _Opened, answer: SlurmAnswer) -> RunSummary:
    if entry.attempt is None:
        return RunSummary(entry.run, problem=entry.problem)
    try:
        return _summary(entry, entry.attempt, answer)
    except RunDirError as error:
        return RunSummary(entry.run, entry.attempt.name, problem=error.message)


def _summary(entry: _Opened, attempt: AttemptDir, answer: SlurmAnswer) -> RunSummary:
    record = entry.record
    events = read_rank_events(attempt)
    last_step = find_last_step(attempt, events)
    signs = read_signs(attempt, events)
    times = [sign.time for sign in signs if events.get(sign.rank)]
    if not times and (printed := find_last_output(attempt, signs)) is not None:
        times = [printed.time]
    state = attempt_state(attempt, record, answer)
    topology = present_topology(entry.run, attempt, read_generations(attempt)) if state.is_gone else None
    worked_out = reconstructed_exit(entry.run, attempt, state, topology) if state.is_gone else None
    known = worked_out and worked_out["reason"] != "unknown"
    return RunSummary(
        entry.run,
        attempt.name,
        STATE_OF_REASON.get(worked_out["reason"], state.state) if worked_out and known else state.state,
        record.label if record else "",
        last_step.step if last_step else None,
        total_steps(record, last_step),
        max(times, default=record.submitted if record else None),
        is_worked_out=bool(known),
    )


def total_steps(record: JobRecord | None, last_step: StepRecord | None) -> int | None:
    """Return the step at which the run ends: as submitted, else as the program prints it; None if neither is known."""
    return (record.total_steps if record else None) or (last_step.total_steps if last_step else None)


def _has_ended(attempt: AttemptDir) -> bool:
    ended = read_exit(attempt)
    decision = read_next(attempt)
    is_last = decision is None or not decision.continues
    return ended is not None and ended.get("exit_code") is not None and ended["reason"] != "requeued" and is_last
