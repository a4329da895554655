"""What `bsl status` shows about the next start of a run: text and JSON. Pure."""

from __future__ import annotations

import time
from typing import Any

from bigsci_launch.runs.chain.carry import Carry
from bigsci_launch.runs.chain.links import NOTHING_QUEUED
from bigsci_launch.runs.find import run_argument
from bigsci_launch.scheduler.job import JobState
from bigsci_launch.status.ending import START
from bigsci_launch.status.read import RunStatus

AGAIN = ("stopped", "preempted", "time_limit", "not_started")
"""Reasons after which a run is simply submitted again."""


def next_lines(status: RunStatus) -> list[tuple[str, str]]:
    """Return how the run continues after this attempt; nothing for a run that ends with it."""
    text = next_text(status)
    return [("next start", text)] if text else []


def next_text(status: RunStatus) -> str | None:
    """Return what will happen after the newest attempt, in one sentence; None if nothing will."""
    carry, decision = status.carry, status.carry.decision
    if carry.queued is not None:
        label = f"job {carry.queued.job.job_id}, attempt {carry.queued.attempt.name},"
        if status.job.state.is_active:
            return f"{label} is queued behind it{_more(carry)}"
        return f"{label} is {carry.queued.job.state.value}{_when(carry.queued.job.expected_start)}{_because(carry)}"
    if status.job.state.is_queued and status.has_started:
        return f"Slurm starts it again{_when(status.job.expected_start)} as {next_name(status)}{_because(carry)}"
    has_ended = status.exit is not None and decision is not None
    if status.job.state.is_active and not has_ended:
        return _while_running(status)
    if decision is None:
        return None
    if decision.action != "continue":
        return f"none: {decision.sentence}"
    words = f": {decision.words}" if decision.words else ""
    if decision.by == "queue":
        return f"none, although {decision.sentence}{words}"
    if decision.asked is False:
        return f"none, although {decision.sentence}; Slurm did not requeue the job{words}"
    return f"Slurm was asked to start it again as {decision.next_attempt}; {decision.sentence}"


def _more(carry: Carry) -> str:
    """How many attempts wait behind the next one, and why not more."""
    more = f", and {len(carry.links) - 1} more behind that" if len(carry.links) > 1 else ""
    is_short = carry.chain is not None and len(carry.links) < carry.chain.links
    words = carry.decision.words if is_short and carry.decision else None
    return more + (f"; no further one: {words}" if words else "")


def _while_running(status: RunStatus) -> str | None:
    """What is planned for the end of a running attempt."""
    carry = status.carry
    if carry.chain is None or carry.is_cancelled:
        return None
    if carry.chain.only_preempted:
        return "it restarts automatically after a preemption or a lost node (slurm.requeue)"
    number = carry.chain.num_starts
    start = f"start {number} of at most {carry.chain.max_starts}" if number else f"at most {carry.chain.max_starts}"
    if carry.chain.by == "requeue":
        return f"it restarts automatically until it is finished ({start}, slurm.chain)"
    words = carry.decision.words if carry.decision else None
    return NOTHING_QUEUED + (f": {words}" if words and words != NOTHING_QUEUED else "")


def next_name(status: RunStatus) -> str:
    """Return the name of the attempt that a requeue of the newest one makes: `0001.r1` after `0001`."""
    base, _, restart = status.attempt.name.partition(".r")
    return f"{base}.r{int(restart or 0) + 1}"


def _because(carry: Carry) -> str:
    return f": {carry.decision.sentence}" if carry.decision and carry.decision.action == "continue" else ""


def _when(moment: float | None) -> str:
    return f" at {time.strftime('%H:%M:%S', time.localtime(moment))}" if moment is not None else ""


def next_advice(status: RunStatus) -> str | None:
    """Return the command that continues the run; None if it continues by itself or must be mended first."""
    carry = status.carry
    if carry.queued is not None or carry.is_cancelled:
        return None
    command = carry.command or "bsl submit"
    if status.job.state is JobState.RUNNING and _is_alone(carry):
        return f"{command}   (queues the next attempt behind it)"
    if status.job.is_gone and status.exit is None:
        return f"{command}   ({START[status.next_start]})"
    if status.job.state.is_active or status.exit is None:
        return None
    decision = carry.decision
    reason = str(status.exit.get("reason"))
    was_stalled = decision is not None and decision.action == "stop" and decision.progress != "made"
    if decision is not None and decision.action == "finished":
        return None
    if reason == "finished" or (reason not in AGAIN and (decision is None or decision.action == "stop")):
        return None
    if was_stalled:
        return f"bsl logs {run_argument(status.run)}   (see why it completed no step); then {command}"
    return f"{command}   ({START[status.next_start]})"


def _is_alone(carry: Carry) -> bool:
    """Whether a chain by queue has nothing behind its running attempt, though another start may follow."""
    chain, decision = carry.chain, carry.decision
    if chain is None or chain.by != "queue" or decision is None:
        return False
    return decision.asked is False and decision.num_starts < decision.max_starts


def next_document(status: RunStatus) -> dict[str, Any] | None:
    """Return the JSON document about the next start; None for a run without a chain, a decision or a queued job."""
    carry, decision = status.carry, status.carry.decision
    text = next_text(status)
    if text is None and carry.chain is None:
        return None
    queued = carry.queued
    requeued = status.job.state.is_queued and status.has_started
    return {
        "text": text,
        "by": carry.chain.by if carry.chain else None,
        "action": decision.action if decision else None,
        "sentence": decision.sentence if decision else None,
        "progress": decision.progress if decision else None,
        "num_starts": decision.num_starts if decision else carry.chain.num_starts if carry.chain else None,
        "max_starts": carry.chain.max_starts if carry.chain else None,
        "asked": decision.asked if decision else None,
        "words": decision.words if decision else None,
        "num_queued": len(carry.links),
        "attempt": queued.attempt.name if queued else next_name(status) if requeued else None,
        "job_id": queued.job.job_id if queued else status.job.job_id if requeued else None,
        "expected_start": (queued.job if queued else status.job).expected_start if queued or requeued else None,
        "submit_again": next_advice(status),
    }
