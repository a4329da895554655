"""Whether an attempt may be submitted now: a run has one active attempt, and one more may wait behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bigsci_launch.errors import RunDirError
from bigsci_launch.launch.job.options import Option
from bigsci_launch.launch.job.request import JobRequest
from bigsci_launch.runs.attempts import JobRecord, age_s, query_attempt, read_job
from bigsci_launch.runs.chain.carry import find_queued
from bigsci_launch.runs.chain.records import ChainRecord, read_chain
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.scheduler.job import JobState

SUBMISSION_GRACE_S = 120.0
"""An attempt that has no job yet and is younger than this may still be in submission."""


@dataclass(frozen=True, slots=True)
class ActiveAttempt:
    """The attempt of a run that is waiting or running, with its job."""

    attempt: AttemptDir
    record: JobRecord
    state: JobState


def find_active(run: RunDir) -> ActiveAttempt | None:
    """Return the active attempt of a run; None if there is none.

    Raises:
        RunDirError: an attempt is being submitted right now.
    """
    attempt = run.latest_attempt()
    if attempt is None:
        return None
    record = read_job(attempt)
    if record is None:
        if attempt.path.exists() and age_s(attempt) < SUBMISSION_GRACE_S:
            raise RunDirError(
                f"run {run.name}: attempt {attempt.name} is being submitted right now, or its submission was killed",
                hint=f"try again in {SUBMISSION_GRACE_S:g} s",
            )
        return None
    job = query_attempt(attempt)
    return ActiveAttempt(attempt, record, job.state) if job.state.is_active else None


def find_turn(run: RunDir, chain: ChainRecord | None) -> ActiveAttempt | None:
    """Return the attempt behind which the next one is queued; None if it need not wait.

    Raises:
        RunDirError: an attempt is active and the next one may not wait behind it, or another one already does.
    """
    active, name = find_active(run), run_argument(run)
    if (queued := find_queued(run)) is not None:
        raise RunDirError(
            f"run {run.name}: attempt {queued.attempt.name} (job {queued.job.job_id}) is queued already; "
            "only one attempt can wait",
            hint=f"`bsl status {name}` shows it, `bsl cancel {name}` ends the whole run",
        )
    if active is None or (chain is not None and chain.by == "queue" and active.record.job_id is not None):
        return active
    raise RunDirError(
        f"run {run.name}: attempt {active.attempt.name} ({active.record.label}) is {active.state.value}; "
        "a run can have only one active attempt",
        hint=f"wait for it (`bsl status {name}`), end it (`bsl cancel {name}`), or choose another run.name; "
        "with slurm.chain.by=queue the next attempt waits behind it",
    )


def behind(request: JobRequest, active: ActiveAttempt) -> JobRequest:
    """Return the request as one that starts when the active attempt has ended, however that ends.

    It continues the chain of that attempt. If that has none, a new chain begins.
    """
    assert request.chain is not None and active.record.job_id is not None
    earlier = read_chain(active.attempt)
    is_same = earlier is not None and not earlier.only_preempted
    first = earlier.first if earlier is not None and is_same else request.attempt.name
    chain = replace(request.chain, first=first, after=active.attempt.name)
    wait = Option(
        "dependency",
        f"afterany:{active.record.job_id}",
        f"slurm.chain.by is queue: behind {active.attempt.name}",
    )
    kept = [option for option in request.options if option.name != "dependency"]
    place = next((at for at, option in enumerate(kept) if option.name == "time"), len(kept))
    return replace(request, chain=chain, options=(*kept[:place], wait, *kept[place:]))
