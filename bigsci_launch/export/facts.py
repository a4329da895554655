"""What a run's records know that a metric can hold. What they do not know is None, and has no metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bigsci_launch.checkpoints.restart import files_of_steps
from bigsci_launch.config.load import load_resolved
from bigsci_launch.errors import BslError
from bigsci_launch.runs.attempts import query_attempt
from bigsci_launch.runs.events import read_last_events
from bigsci_launch.runs.find import find_attempt
from bigsci_launch.runs.generations.read import number_in
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.status.read import Checkpoint, find_last_checkpoint
from bigsci_launch.watch.show.live import PHASES, LiveView, read_live_view

TAIL_BYTES = 128 << 10
"""The end of a rank's records from which its phases are counted: some hundred steps."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of a run now. `phases` are the seconds a step that the rank which reports steps spends in each."""

    view: LiveView
    num_attempts: int
    tokens_per_step: int | None = None
    utilization: float | None = None
    grad_norm: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None


def read_facts(run: RunDir, job: JobInfo | None = None) -> RunFacts:
    """Return what the files of a run show. `job` is Slurm's last answer; without it, only files are read.

    Raises:
        RunDirError: the run has no attempt, or cannot be read.
    """
    attempt = find_attempt(run)
    tails = [read_last_events(path, TAIL_BYTES) for path in files_of_steps(attempt)]
    records = max(tails, key=lambda tail: number_in(_newest_step(tail).get("time")) or 0.0, default=[])
    newest = _newest_step(records)
    return RunFacts(
        view=read_live_view(run, job),
        num_attempts=len(run.attempts()),
        tokens_per_step=tokens_per_step(attempt),
        utilization=number_in(newest.get("utilization")),
        grad_norm=number_in(newest.get("grad_norm")),
        phases=seconds_by_phase(records),
        checkpoint=find_last_checkpoint(run),
    )


def _newest_step(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next((record for record in reversed(records) if record.get("kind") == "step"), {})


def ask_job(run: RunDir) -> JobInfo:
    """Return what is known of the job of the newest attempt. Slurm is asked.

    Raises:
        RunDirError: the run has no attempt, or cannot be read.
    """
    return query_attempt(find_attempt(run))


def tokens_per_step(attempt: AttemptDir) -> int | None:
    """Return the tokens of a global batch; None for a run file that does not describe them."""
    try:
        config = load_resolved(attempt.config)
    except BslError:
        return None
    if not config.describes("training", "model"):
        return None
    return config.training.global_batch_size * config.model.sequence_length


def seconds_by_phase(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how long a rank was in each phase, divided by the steps that it has done in that time.

    Only what lies between two steps of one process counts. Empty if there are none such, or no heartbeats.
    """
    spent: dict[str, float] = {}
    num_steps = 0
    for steps in _between_steps(records):
        num_steps += 1
        for phase, seconds in steps.items():
            spent[phase] = spent.get(phase, 0.0) + seconds
    return {phase: seconds / num_steps for phase, seconds in spent.items()}


def _between_steps(records: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """Yield the seconds in each phase from one step that was reported to the next."""
    pending: dict[str, float] = {}
    phase, since, has_step = None, 0.0, False
    for record in records:
        now, kind = number_in(record.get("mono")), record.get("kind")
        if now is None:
            continue
        if kind == "start" or now < since:
            phase, has_step, pending = None, False, {}
        if phase is not None:
            pending[phase] = pending.get(phase, 0.0) + now - since
        since = now
        if kind == "heartbeat":
            phase = one_phase(record.get("phase"))
        elif kind == "step":
            if has_step and pending:
                yield pending
            pending, has_step = {}, True


def one_phase(value: object) -> str | None:
    """Return a phase as a label: what is no word of ours is `other`."""
    return None if not isinstance(value, str) else value if value in PHASES else "other"
