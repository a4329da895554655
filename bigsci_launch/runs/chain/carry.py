"""What will happen next to a run: the decision of its newest attempt, and the jobs that wait behind it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.attempts import query_attempts, read_job
from bigsci_launch.runs.chain.records import ChainRecord, NextRecord, read_chain, read_next
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json
from bigsci_launch.scheduler.job import JobInfo


@dataclass(frozen=True, slots=True)
class QueuedAttempt:
    """An attempt that waits behind the newest one, and its job."""

    attempt: AttemptDir
    job: JobInfo


@dataclass(frozen=True, slots=True)
class Carry:
    """How a run continues after its newest attempt, as far as it is known."""

    chain: ChainRecord | None
    decision: NextRecord | None
    links: tuple[QueuedAttempt, ...]
    """The attempts that wait behind it, the next one first."""
    is_cancelled: bool
    command: str | None
    """The command that submitted the attempt; None if it is not known."""

    @property
    def queued(self) -> QueuedAttempt | None:
        """The attempt that starts next."""
        return self.links[0] if self.links else None


def read_carry(run: RunDir, attempt: AttemptDir) -> Carry:
    """Return what is known about the start after `attempt`. Slurm is asked only if another attempt is queued."""
    decision = read_next(attempt)
    return Carry(
        chain=read_chain(attempt),
        decision=decision if decision is not None and decision.attempt == attempt.name else None,
        links=find_queued(run),
        is_cancelled=attempt.cancel_mark.exists(),
        command=submit_command(run, attempt),
    )


def find_queued(run: RunDir, *, ask_slurm: bool = True) -> tuple[QueuedAttempt, ...]:
    """Return the attempts whose jobs wait behind another one of the run, or may wait, oldest first."""
    attempts = [attempt for attempt in run.queued_attempts() if read_job(attempt) is not None]
    jobs = query_attempts(attempts, ask_slurm=ask_slurm)
    found = (QueuedAttempt(attempt, jobs[attempt.name]) for attempt in attempts)
    return tuple(each for each in found if not each.job.state.is_over and not each.job.is_gone)


def submit_command(run: RunDir, attempt: AttemptDir) -> str | None:
    """Return the command that submitted the attempt, as a person types it; None if it was not recorded."""
    for folder in (attempt, run.attempt(attempt.base_name)):
        try:
            words = read_json(folder.provenance)["command"]
            return shlex.join(["bsl", *(str(word) for word in words[1:])])
        except (RunDirError, KeyError, TypeError):
            continue
    return None
