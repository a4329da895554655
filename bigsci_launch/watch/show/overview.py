"""All that the page of a run shows, read from its directory: its attempts and their steps, findings, acts, watchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bigsci_launch.checkpoints.restart import find_restart
from bigsci_launch.errors import BslError, RunDirError
from bigsci_launch.loss_jump import RECENT, describe_jump, measure_jump
from bigsci_launch.runs.attempts import query_attempts, read_exit, read_job
from bigsci_launch.runs.layout import AttemptDir, read_json
from bigsci_launch.runs.watching.heartbeat import WatcherHeartbeat, read_all_heartbeats
from bigsci_launch.runs.watching.ledger import Act, RunFinding, read_acts, read_all_findings
from bigsci_launch.runs.watching.outbox import undelivered
from bigsci_launch.runs.watching.typed import typed
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.slow.picture import StepPicture
from bigsci_launch.status.read import RunStatus, reconstructed_exit
from bigsci_launch.watch.show.history import AttemptHistory, StepPoint, read_history

SEARCHED_BYTES = 64 << 20
"""Records of an attempt that are searched for what changed at its start; the newest attempt's always are."""


@dataclass(frozen=True, slots=True)
class SeamMark:
    """Where an attempt continued the run. `sentence` is what is known of the loss there, and
    `verdict` in a word: `spike`, `other loss`, `equal`, `no jump` or `unknown`. `causes` is what changed."""

    attempt: str
    step: int
    sentence: str
    verdict: str
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """An attempt: its job, its first and last step, and why it ended; `exit` is None while it may run, and if nothing
    is known."""

    name: str
    label: str
    job: JobInfo
    exit: Mapping[str, Any] | None
    first: int | None
    last: int | None


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A run at `status.asked`."""

    status: RunStatus
    histories: tuple[AttemptHistory, ...]
    rows: tuple[AttemptRow, ...]
    seams: tuple[SeamMark, ...] = ()
    findings: tuple[RunFinding, ...] = ()
    acts: tuple[Act, ...] = ()
    heartbeats: tuple[WatcherHeartbeat, ...] = ()
    undelivered: tuple[str, ...] = ()
    queued: tuple[str, ...] = field(default=())
    steps: StepPicture | None = None


def read_overview(status: RunStatus) -> RunOverview:
    """Return what the directory of a run holds, next to its status. Slurm is asked once about older attempts.

    Raises:
        RunDirError: the run cannot be read.
    """
    run = status.run
    histories = read_history(run)
    return RunOverview(
        status=status,
        histories=tuple(histories),
        rows=tuple(_rows(status, histories)),
        seams=tuple(_seams(status, histories)),
        findings=tuple(read_all_findings(run)),
        acts=tuple(read_acts(run)),
        heartbeats=tuple(read_all_heartbeats(run)),
        undelivered=tuple(undelivered(run, status.asked)),
        queued=tuple(_queued_label(attempt) for attempt in run.queued_attempts()),
        steps=_steps(status.attempt),
    )


def _steps(attempt: AttemptDir) -> StepPicture | None:
    """Return what the watcher of an attempt has kept of its steps; None if nothing, or what cannot be read."""
    try:
        return typed(StepPicture, read_json(attempt.steps))
    except (RunDirError, ValueError):
        return None


def _rows(status: RunStatus, histories: Sequence[AttemptHistory]) -> list[AttemptRow]:
    older = [held.attempt for held in histories if held.attempt.name != status.attempt.name]
    jobs = {**query_attempts(older), status.attempt.name: status.job}
    rows = []
    for held in histories:
        attempt, job = held.attempt, jobs[held.attempt.name]
        ended = status.exit if attempt.name == status.attempt.name else _exit_of(status, attempt, job)
        points = held.points
        first, last = (points[0].step, points[-1].step) if points else (None, None)
        rows.append(AttemptRow(attempt.name, _label(attempt), job, ended, first, last))
    return rows


def _exit_of(status: RunStatus, attempt: AttemptDir, job: JobInfo) -> Mapping[str, Any] | None:
    return read_exit(attempt) or reconstructed_exit(status.run, attempt, job, status.topology)


def _label(attempt: AttemptDir) -> str:
    with suppress(RunDirError):
        if (record := read_job(attempt)) is not None:
            return record.label
    return "no job"


def _queued_label(attempt: AttemptDir) -> str:
    return f"{attempt.name}, {_label(attempt)}"


def _seams(status: RunStatus, histories: Sequence[AttemptHistory]) -> list[SeamMark]:
    seams = []
    for at, held in enumerate(histories):
        if at and held.points:
            seams.append(_seam(status, histories[:at], held))
    return seams


def _seam(status: RunStatus, earlier: Sequence[AttemptHistory], held: AttemptHistory) -> SeamMark:
    """Return what is known of the start of an attempt: from its records, if they are not too long, else by its losses
    alone."""
    name, step = held.attempt.name, held.points[0].step
    restart = status.restart if name == status.attempt.name else None
    if restart is None and _size(held.attempt) <= SEARCHED_BYTES:
        restart = find_restart(status.run, held.attempt)
    if restart is not None:
        return SeamMark(name, step, restart.sentence, restart.verdict, restart.causes)
    before = {point.step: point.loss for each in earlier for point in each.points if point.loss is not None}
    after = {point.step: point.loss for point in held.points[:RECENT] if point.loss is not None}
    with suppress(BslError, ValueError):
        jump = measure_jump(_around(before, step), after)
        return SeamMark(name, step, describe_jump(jump, source="before"), jump.verdict)
    return SeamMark(name, step, "unknown whether the loss jumped", "unknown")


def _around(losses: Mapping[int, float], step: int) -> dict[int, float]:
    """Return the losses that a jump at `step` is measured against, without those of the whole run before."""
    return {at: loss for at, loss in losses.items() if step - 10 * RECENT <= at}


def _size(attempt: AttemptDir) -> int:
    try:
        return sum(path.stat().st_size for path in attempt.events.iterdir())
    except OSError:
        return 0


def points_of(
    histories: Sequence[AttemptHistory],
) -> list[tuple[AttemptHistory, tuple[StepPoint, ...], tuple[StepPoint, ...]]]:
    """Return each attempt with its steps that count, and with those that a later attempt repeated."""
    found = []
    limit: int | None = None
    for held in reversed(histories):
        kept = tuple(point for point in held.points if limit is None or point.step < limit)
        found.append((held, kept, held.points[len(kept) :]))
        if held.points:
            limit = held.points[0].step if limit is None else min(limit, held.points[0].step)
    return list(reversed(found))
