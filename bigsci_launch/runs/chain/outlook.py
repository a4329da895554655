"""How far a chain carries a run: the starts that are left, the jobs that wait, and what a watcher should say of them.

It is read from the records of the run, and from one question to Slurm that the caller may leave out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bigsci_launch.runs.attempts import read_exit
from bigsci_launch.runs.chain.carry import QueuedAttempt, find_queued
from bigsci_launch.runs.chain.links import HELD, NEVER, NOTHING_QUEUED
from bigsci_launch.runs.chain.records import ChainRecord, NextRecord, read_chain, read_next
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json

NO_LINK_S = 300.0
NO_FAILURE = ("stopped", "time_limit", "preempted", "requeued", "node_failure", "finished", "not_started")
"""Reasons of starts whose end at a step is unrelated to that step."""


@dataclass(frozen=True, slots=True)
class ChainWarning:
    """Something about a chain that people should know before it stops. `kind` is `last_link`, `no_link`,
    `restart_storm`, `finished_but_queued` or `stuck_link`; two warnings with one `key` are the same."""

    kind: str
    key: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Outlook:
    """What follows an attempt. `starts_left` and `hours_left` are None where there is no such bound, or no chain.

    `why_last` is why no other start follows; None if one does, as far as is known.
    """

    starts_left: int | None
    hours_left: float | None
    links: tuple[QueuedAttempt, ...]
    why_last: str | None
    warnings: tuple[ChainWarning, ...]

    @property
    def is_last(self) -> bool:
        return self.why_last is not None


def chain_outlook(run: RunDir, attempt: AttemptDir, *, ask_slurm: bool = True) -> Outlook:
    """Return what follows `attempt`, the newest of its run. Without `ask_slurm`, a job that is recorded may wait.

    Raises:
        RunDirError: the records of the run cannot be read.
    """
    chain, decision, links = read_chain(attempt), read_next(attempt), find_queued(run, ask_slurm=ask_slurm)
    now = time.time()
    starts_left = max(0, chain.max_starts - (chain.num_starts or 1)) if chain is not None else None
    hours_left = _hours_left(run, chain, now)
    why_last = _why_last(chain, decision, links, starts_left, hours_left)
    warnings = (
        *_last_link(attempt, chain, why_last),
        *_no_link(attempt, decision, links, why_last, now),
        *_storm(run),
        *_finished(run, attempt, links),
        *_stuck(links),
    )
    return Outlook(starts_left, hours_left, links, why_last, warnings)


def _hours_left(run: RunDir, chain: ChainRecord | None, now: float) -> float | None:
    """Return for how many hours starts may still begin; None without such a bound, or if the first start is unknown."""
    if chain is None or chain.max_hours is None:
        return None
    first = run.attempt(chain.first).chain
    began = read_json(first).get("started") if first.exists() else None
    return max(0.0, chain.max_hours - (now - began) / 3600) if isinstance(began, (int, float)) else None


def _why_last(
    chain: ChainRecord | None,
    decision: NextRecord | None,
    links: tuple[QueuedAttempt, ...],
    starts_left: int | None,
    hours_left: float | None,
) -> str | None:
    if chain is None:
        return None if links else "the run has no slurm.chain"
    if chain.only_preempted:
        return (
            "slurm.requeue starts the run again only after a preemption or a lost node; slurm.chain does after any end"
        )
    if starts_left == 0:
        return f"this is start {chain.num_starts}, and slurm.chain.max_starts is {chain.max_starts}"
    if hours_left == 0:
        return f"slurm.chain.max_hours, {chain.max_hours:g}, have passed since the first start"
    if chain.by == "queue" and not links and _was_refused(decision):
        return f"{NOTHING_QUEUED}: {decision.words}" if decision is not None else None
    return None


def _was_refused(decision: NextRecord | None) -> bool:
    return decision is not None and decision.asked is False and decision.words not in (None, NOTHING_QUEUED)


def _last_link(attempt: AttemptDir, chain: ChainRecord | None, why_last: str | None) -> tuple[ChainWarning, ...]:
    """Warn of the last start of a chain. A run without one needs no warning: no other start is expected."""
    if why_last is None or chain is None or chain.only_preempted:
        return ()
    sentence = f"this is the last start of the chain: {why_last}"
    return (ChainWarning("last_link", f"last_link:{attempt.name}", sentence),)


def _no_link(
    attempt: AttemptDir,
    decision: NextRecord | None,
    links: tuple[QueuedAttempt, ...],
    why_last: str | None,
    now: float,
) -> tuple[ChainWarning, ...]:
    """Warn if a chain by queue runs with nothing behind it: whether it can queue an attempt at its end is not known."""
    if links or why_last is not None or decision is None or decision.by != "queue" or decision.action != "continue":
        return ()
    if now - decision.decided < NO_LINK_S:
        return ()
    sentence = f"{NOTHING_QUEUED}: the job script tries again when it ends; `bsl submit` queues one now"
    return (ChainWarning("no_link", f"no_link:{attempt.name}", sentence),)


def _storm(run: RunDir) -> tuple[ChainWarning, ...]:
    """Warn if the last two starts failed at the same step: the third would stop the chain."""
    ended = [(each, read_exit(each), read_next(each)) for each in run.attempts()]
    over = [(each, end, found) for each, end, found in ended if end is not None and end.get("exit_code") is not None]
    if len(over) < 2:
        return ()
    (one, first, before), (two, second, after) = over[-2:]
    reasons = [str(end.get("reason")) for end in (first, second)]
    if before is None or after is None or before.step is None or before.step != after.step:
        return ()
    if any(reason in NO_FAILURE for reason in reasons) or after.progress == "made":
        return ()
    same = reasons[0] if reasons[0] == reasons[1] else " and ".join(reasons)
    where = f"at step {after.step}" if after.step else "before completing a step"
    third = "; a third end there stops the chain" if after.action == "continue" else ""
    sentence = f"starts {one.name} and {two.name} ended {where}: {same}{third}"
    return (ChainWarning("restart_storm", f"restart_storm:{two.name}", sentence),)


def _finished(run: RunDir, attempt: AttemptDir, links: tuple[QueuedAttempt, ...]) -> tuple[ChainWarning, ...]:
    decision = read_next(attempt)
    if not links or decision is None or decision.action == "continue":
        return ()
    over = "the run is finished" if decision.action == "finished" else f"the chain has stopped ({decision.sentence})"
    jobs = " ".join(each.job.job_id for each in links)
    sentence = f"{over}, but attempts are still queued (jobs {jobs}): each ends when it starts; "
    sentence += f"`bsl cancel {run_argument(run)}` ends them now"
    return (ChainWarning("finished_but_queued", f"finished_but_queued:{attempt.name}", sentence),)


def _stuck(links: tuple[QueuedAttempt, ...]) -> tuple[ChainWarning, ...]:
    """Warn of a job that will not start by itself."""
    found = []
    for link in links:
        label = f"job {link.job.job_id} (attempt {link.attempt.name})"
        key = f"stuck_link:{link.job.job_id}"
        if link.job.reason == NEVER:
            found.append(ChainWarning("stuck_link", key, f"{label} can never start: Slurm reports {NEVER}"))
        elif link.job.reason in HELD:
            again = f"`scontrol release {link.job.job_id}` lets it start"
            found.append(ChainWarning("stuck_link", key, f"{label} is held ({link.job.reason}): {again}"))
    return tuple(found)
