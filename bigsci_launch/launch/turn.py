"""Whether an attempt may be submitted now: a run has one active attempt, and others may wait behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigsci_launch.errors import RunDirError
from bigsci_launch.launch.job.options import Option
from bigsci_launch.launch.job.request import JobRequest
from bigsci_launch.runs.attempts import JobRecord, age_s, ask_about, find_job, query_attempt, read_job
from bigsci_launch.runs.chain.carry import QueuedAttempt, find_queued
from bigsci_launch.runs.chain.records import ChainRecord, read_chain
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.lease import is_renewed

SUBMISSION_GRACE_S = 180.0
"""An attempt that has no job yet and is younger than this may still be in submission: sbatch may take two minutes."""


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
    """Return the active attempt of a run; None if there is none. With `force`, one of which nobody here can tell
    whether it still runs counts as ended.

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
            hint=f"ask on {where}: `bsl status {run_argument(run)}`; if nothing can run there any longer, "
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
    return not answer.has_answered or (record.cluster is not None and record.cluster != answer.cluster)


def require_silent(run: RunDir) -> None:
    """Raise RunDirError if the launcher of the newest attempt, on another host, still renews its lease.

    Looks for some seconds. Nobody should start a run that trains, whatever else they force.
    """
    attempt = run.latest_attempt()
    record = read_job(attempt) if attempt is not None else None
    if attempt is None or record is None or not _may_run_elsewhere(record, query_attempt(attempt)):
        return
    if record.launcher is not None and is_renewed(attempt.lease):
        raise RunDirError(
            f"run {run.name}: attempt {attempt.name} ({record.label}) runs: it has just given a sign of life",
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

    All: if somebody cancels one in the middle, it still waits for the others. It continues the chain of the attempt
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
