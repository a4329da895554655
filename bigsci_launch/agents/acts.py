"""Acts of agents: what one would do, and doing it after it was confirmed, recorded with its author."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

from bigsci_launch.agents.confirmations import NotConfirmed, PlannedAct
from bigsci_launch.errors import BslError, RunDirError
from bigsci_launch.launch.cancel import cancel_run, would_end
from bigsci_launch.printable import one_line
from bigsci_launch.procfs import user_name
from bigsci_launch.runs.attempts import read_job
from bigsci_launch.runs.control.ask import ask_run, require_askable
from bigsci_launch.runs.find import find_run
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.ledger import Act, record_act
from bigsci_launch.status.control import next_lines

CANCEL = "cancel"
LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class Preview:
    """An act, and what would happen if it were confirmed."""

    act: PlannedAct
    lines: tuple[str, ...]


def preview(run_name: str, verb: str, why: str, after_step: int | None = None) -> Preview:
    """Return what an act would do. Nothing is written.

    Raises:
        RunDirError: there is no such run, or the act is not possible now.
    """
    run = find_run(run_name)
    reason = one_line(why.strip())
    if not reason:
        raise RunDirError("an act needs a reason, which the group of the run reads", hint="give why")
    if verb == CANCEL:
        jobs = would_end(run)
        lines = tuple(f"{job} would be ended: TERM now, KILL some seconds later" for job in jobs)
    else:
        attempt = require_askable(run, verb, after_step)
        record = read_job(attempt)
        jobs = (f"attempt {attempt.name}, {record.label if record else 'no job recorded'}",)
        lines = tuple(next_lines(run, attempt, verb, after_step, time.time()))
    return Preview(PlannedAct(run.path, verb, reason, after_step, jobs), lines)


def carry_out(act: PlannedAct, client: str) -> tuple[str, ...]:
    """Do what was confirmed for the agent `client`, and return what was done.

    Raises:
        NotConfirmed: it would reach another attempt or job than the one that was shown.
        RunDirError, SlurmRefused, SlurmUnavailable: it is not possible, or must not be done.
    """
    if preview(str(act.run), act.verb, act.why, act.after_step).act != act:
        raise NotConfirmed(f"{act.verb} would reach another attempt or job now", hint="ask for the act again")
    run, agent = RunDir(act.run), one_line(client)[:LONGEST_NAME]
    if act.verb == CANCEL:
        return tuple(_cancel(run, act, agent).splitlines())
    attempt = ask_run(run, act.verb, f"{act.why} (by agent {agent})", act.after_step)
    return (f"requested: {act.verb}", *next_lines(run, attempt, act.verb, act.after_step, time.time()))


def _cancel(run: RunDir, act: PlannedAct, agent: str) -> str:
    """End the run's jobs, with a line in its ledger before and after."""
    who = f"{user_name(os.geteuid())}, by agent {agent}"
    attempt = run.latest_attempt()
    name = attempt.name if attempt is not None else None
    begun = Act(f"{CANCEL}-{time.time_ns()}-{os.getpid()}", CANCEL, who, act.why, "begun", attempt=name)
    try:
        record_act(run, begun)
    except OSError as error:
        raise RunDirError(f"{run.name} was not cancelled: {run.acts}: {error.strerror or error}") from error
    try:
        words = cancel_run(run)
    except BslError as error:
        record_act(run, replace(begun, state="failed", words=error.message))
        raise
    record_act(run, replace(begun, state="done", words=words))
    return words
