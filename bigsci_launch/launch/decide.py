"""Whether and how the next attempt of a run starts: each question of a submission is asked once, and in this order.

Whether the run directory is this run's; behind which jobs the attempt waits, since a run has one active attempt; from
which checkpoint it resumes; what has changed since that was saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.checkpoints.changes import (
    SEEN_BY_RANKS,
    Acceptance,
    DataLikeness,
    RunChange,
    change_lines,
    find_changes,
    read_run_id,
    require_accepted,
)
from bigsci_launch.checkpoints.folder import CheckpointRecord, CheckpointsDir, finish_interrupted, read_record
from bigsci_launch.checkpoints.resume import describe_run, require_not_lost, verify_resume
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import BslError, RunDirError
from bigsci_launch.launch.claim import require_same_run
from bigsci_launch.launch.freeze import require_own_place
from bigsci_launch.launch.job.options import Option
from bigsci_launch.launch.job.request import JobRequest
from bigsci_launch.progress import Report, Shown, not_shown
from bigsci_launch.runs.attempts import JobRecord, adopt_jobs, age_s, ask_about, find_job, query_attempt, read_job
from bigsci_launch.runs.chain.carry import QueuedAttempt, find_queued
from bigsci_launch.runs.chain.links import SUBMISSION_GRACE_S
from bigsci_launch.runs.chain.records import ChainRecord, read_chain
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.lease import is_renewed

NEW_RUN = "new"
"""Stands for the run_id of a run that has no directory yet."""


@dataclass(frozen=True, slots=True)
class ActiveAttempt:
    """The attempt of a run that is waiting or running, with its job."""

    attempt: AttemptDir
    record: JobRecord
    state: JobState


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of an attempt behind others: the last of them, and the jobs of all.

    `num_starts` counts the starts of the chain up to there, `num_waiting` those of them that wait behind another one.
    """

    attempt: AttemptDir
    jobs: tuple[str, ...]
    num_starts: int
    num_waiting: int


def find_active(run: RunDir, *, force: bool = False) -> ActiveAttempt | None:
    """Return the active attempt of a run; None if there is none. With `force`, an attempt that may still run
    elsewhere counts as ended.

    Raises:
        RunDirError: an attempt is being submitted right now, or may still run.
        SlurmError: an attempt has no record of its job, and squeue gave no answer.
    """
    attempt = run.latest_attempt()
    if attempt is None:
        return None
    record = find_job(attempt)
    if record is None:
        if attempt.path.exists() and not attempt.exit.exists() and (age := age_s(attempt)) < SUBMISSION_GRACE_S:
            raise RunDirError(
                f"run {run.name}: attempt {attempt.name} is being submitted right now, or its submission was killed "
                "or got no answer",
                hint=f"`bsl status {run_argument(run)}` shows it once it is submitted; if it never is, submit again "
                f"in {SUBMISSION_GRACE_S - age:.0f} s",
            )
        return None
    job = query_attempt(attempt)
    if not force and _may_run_elsewhere(record, job):
        where = record.launcher.host if record.launcher else f"cluster {record.cluster}"
        raise RunDirError(
            f"run {run.name}: attempt {attempt.name} ({record.label}) may still run: {job.reason}",
            hint=f"check on {where}: `bsl status {run_argument(run)}`; if nothing can run there any longer, "
            "`bsl submit --force` starts the next attempt",
        )
    return ActiveAttempt(attempt, record, job.state) if job.state.is_active else None


def _may_run_elsewhere(record: JobRecord, job: JobInfo) -> bool:
    """Whether the job may run where this machine cannot ask: on another host, or on another cluster."""
    if job.state is not JobState.UNKNOWN or job.is_gone:
        return False
    if record.launcher is not None:
        return True
    answer = ask_about([record], needs_cluster=True)
    return not answer.has_answered or (record.cluster is not None and record.cluster != answer.cluster.name)


def require_silent(run: RunDir) -> None:
    """Raise RunDirError if the launcher of the newest attempt, on another host, still renews its lease.

    Looks for some seconds. A run that trains must not be started again, whatever else is forced.
    """
    attempt = run.latest_attempt()
    record = read_job(attempt) if attempt is not None else None
    if attempt is None or record is None or not _may_run_elsewhere(record, query_attempt(attempt)):
        return
    if record.launcher is not None and is_renewed(attempt.lease):
        raise RunDirError(
            f"run {run.name}: attempt {attempt.name} ({record.label}) still runs: it has just renewed its lease",
            hint=f"end it on {record.launcher.host}: `bsl cancel {run_argument(run)}`",
        )


def find_turn(run: RunDir, chain: ChainRecord | None, *, force: bool = False) -> Turn | None:
    """Return behind which jobs the next attempt is queued; None if it need not wait. `force` is that of `find_active`.

    Raises:
        RunDirError: an attempt is active and the next one may not wait behind it, or as many as may wait already do.
    """
    active, name = find_active(run, force=force), run_argument(run)
    queued, may_wait = find_queued(run), chain.links if chain is not None and chain.by == "queue" else 1
    if len(queued) >= may_wait:
        shown = ", ".join(f"attempt {each.attempt.name} (job {each.job.job_id})" for each in queued)
        raise RunDirError(
            f"run {run.name}: {shown} {'is' if len(queued) == 1 else 'are'} queued already; "
            + ("only one attempt can wait" if may_wait == 1 else f"slurm.chain.links is {may_wait}"),
            hint=f"`bsl status {name}` shows it, `bsl cancel {name}` ends the whole run",
        )
    if active is None and not queued:
        return None
    if chain is not None and chain.by == "queue" and (active is None or active.record.job_id is not None):
        return _behind_all(run, active, queued)
    assert active is not None, "a run without a chain may have no attempt that waits"
    raise RunDirError(
        f"run {run.name}: attempt {active.attempt.name} ({active.record.label}) is {active.state.value}; "
        "a run can have only one active attempt",
        hint=f"wait for it (`bsl status {name}`), end it (`bsl cancel {name}`), or choose another run.name; "
        "with slurm.chain.by=queue the next attempt waits behind it",
    )


def _behind_all(run: RunDir, active: ActiveAttempt | None, queued: Sequence[QueuedAttempt]) -> Turn:
    jobs = [str(active.record.job_id)] if active is not None else []
    jobs += [each.job.job_id for each in queued]
    last = queued[-1].attempt if queued else run.latest_attempt()
    assert last is not None, "an attempt is active or waits"
    earlier = read_chain(active.attempt) if active is not None else None
    started = (earlier.num_starts or 1) if earlier is not None and not earlier.only_preempted else 0
    return Turn(last, tuple(jobs), started + len(queued), len(queued))


def behind(request: JobRequest, turn: Turn) -> JobRequest:
    """Return the request as one that starts when all attempts before it have ended, however they end.

    All: if one in the middle is cancelled, it still waits for the others. It continues the chain of the attempt
    before it. If that has none, a new chain begins.
    """
    assert request.chain is not None
    earlier = read_chain(turn.attempt)
    is_same = earlier is not None and not earlier.only_preempted
    first = earlier.first if earlier is not None and is_same else request.attempt.name
    chain = replace(request.chain, first=first, after=turn.attempt.name)
    wait = Option(
        "dependency", f"afterany:{':'.join(turn.jobs)}", f"slurm.chain.by is queue: behind {turn.attempt.name}"
    )
    kept = [option for option in request.options if option.name != "dependency"]
    place = next((at for at, option in enumerate(kept) if option.name == "time"), len(kept))
    return replace(request, chain=chain, options=(*kept[:place], wait, *kept[place:]))


@dataclass(frozen=True, slots=True)
class AttemptStart:
    """How the next attempt starts: behind which jobs it waits, and the checkpoint from which `bsl train` would resume.

    `turn` is None if it need not wait. `folder` is None for a start at step 0, for another program, and if it is not
    known yet from which checkpoint the attempt will resume, because it waits behind one that still saves.
    """

    turn: Turn | None
    folder: Path | None


def decide_start(
    config: RunConfig, request: JobRequest, verifying: Shown = not_shown, *, force: bool = False
) -> AttemptStart:
    """Return how the attempt of `request` starts. Jobs of the run that no attempt has recorded are recorded.

    The checkpoint is verified, so that a job does not wait for hours only to find it damaged. With `force`, an attempt
    that may still run elsewhere, and gives no sign of life, counts as ended.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or belongs to another run.
        RunDirError: the run has an active attempt and the next one may not wait, belongs to another model, or is where
            others could exchange it.
        SlurmError: an attempt has no record of its job, and squeue gave no answer.
    """
    require_own_place(request.run)
    require_same_run(request.run, config, request.topology)
    if request.scheduler == "slurm":
        adopt_jobs(request.run)
    if force:
        require_silent(request.run)
    turn = find_turn(request.run, request.chain, force=force)
    return AttemptStart(turn, None if turn is not None else _find_checkpoint(config, request, verifying))


def _find_checkpoint(config: RunConfig, request: JobRequest, verifying: Shown) -> Path | None:
    load = config.checkpoint.load
    if not config.run.starts_trainer or (load in ("auto", "none") and not request.run.path.is_dir()):
        return None
    checkpoints = CheckpointsDir(request.run.checkpoints)
    finish_interrupted(checkpoints)
    with verifying() as report_progress:
        folder = verify_resume(config, request.topology, checkpoints, report_progress)
    if folder is None and load == "auto":
        require_not_lost(request.run)
    return folder


def accept_changes(
    start: AttemptStart, config: RunConfig, request: JobRequest, tell: Report, *, force: bool
) -> JobRequest:
    """Report what has changed since the checkpoint was saved. Return the request with what `force` accepts of it.

    These are the changes themselves, and other data, which perhaps only the ranks see. While the checkpoint is not
    known, it is every change.

    Raises:
        CheckpointError: the run has changed such that it needs `force`.
    """
    folder, changes = start.folder, list[RunChange]()
    if folder is not None:
        tell(f"resumes from {folder}, which is unchanged since it was saved")
        changes = _find_changes(folder, read_record(folder), config, request)
    if force and config.run.starts_trainer:
        request = replace(request, accepted=_forced(folder, changes, request))
    if folder is not None:
        require_accepted(str(folder), changes, request.accepted)
        for line in change_lines(folder.name, changes, request.accepted):
            tell(line)
    return request


def _find_changes(folder: Path, record: CheckpointRecord, config: RunConfig, request: JobRequest) -> list[RunChange]:
    is_new = not request.run.record.exists()
    now = describe_run(config, request.topology, run_id=NEW_RUN if is_new else read_run_id(request.run))
    is_own = folder.parent.resolve() == request.run.checkpoints.resolve()
    return find_changes(record, now, is_own=is_own, likeness=_likeness(record, Path(config.data.prefix)))


def _forced(folder: Path | None, changes: list[RunChange], request: JobRequest) -> Acceptance:
    if folder is None:
        return Acceptance(everything=True) if request.run.record.exists() else request.accepted
    keys = {change.key for change in changes if change.severity == "stop"}
    return Acceptance(tuple(sorted(keys | SEEN_BY_RANKS)))


def _likeness(record: CheckpointRecord, prefix: Path) -> DataLikeness | None:
    """Return how the dataset at `prefix` relates to that of a checkpoint; None if this machine cannot read it."""
    if record.data is None:
        return "unknown"
    try:
        from bigsci_launch.data.fingerprint import compare_with_saved
        from bigsci_launch.data.indexed import open_dataset

        return compare_with_saved(record.data, open_dataset(prefix))
    except (BslError, ImportError):
        return None
