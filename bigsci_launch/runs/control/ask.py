"""Asking something of a run: what cannot come true is refused before it is written."""

from __future__ import annotations

import grp

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.attempts import query_attempt, read_job
from bigsci_launch.runs.control.requests import write_request
from bigsci_launch.runs.find import find_attempt, run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.runs.ownership import user_name
from bigsci_launch.runs.signs import find_last_step, read_rank_events


def ask_run(run: RunDir, verb: str, why: str, after_step: int | None) -> AttemptDir:
    """Write a request for the newest attempt of a run, and return that attempt.

    Raises:
        RunDirError: the attempt has not begun or has ended, what is asked is not possible, or it cannot be written.
    """
    attempt = find_attempt(run)
    _require_running(run, attempt)
    _require_possible(run, attempt, verb, after_step)
    try:
        write_request(run, verb, why, after_step=after_step, attempt=attempt.name)
    except OSError as error:
        raise _cannot_write(run, error) from error
    return attempt


def _require_running(run: RunDir, attempt: AttemptDir) -> None:
    state, shown = query_attempt(attempt).state, run_argument(run)
    if state.is_queued:
        raise RunDirError(
            f"attempt {attempt.name} of {run.name} has not begun: {state.value}",
            hint=f"`bsl cancel {shown}` takes it out of the queue",
        )
    if state.is_over:
        queued = bool(run.queued_attempts())
        raise RunDirError(
            f"attempt {attempt.name} of {run.name} has ended: {state.value}",
            hint=f"`bsl cancel {shown}` takes the next one out of the queue" if queued else f"see `bsl status {shown}`",
        )


def _require_possible(run: RunDir, attempt: AttemptDir, verb: str, after_step: int | None) -> None:
    record = read_job(attempt)
    if verb == "save" and record is not None and record.total_steps is None:
        raise RunDirError(
            f"the program of {run.name} is not `bsl train`: it saves when it wants to",
            hint="`exit` and `restart` ask it to save and stop",
        )
    last = find_last_step(attempt, read_rank_events(attempt)) if after_step is not None else None
    if after_step is not None and last is not None and last.step >= after_step:
        raise RunDirError(f"step {after_step} of {run.name} is past: {last.step} steps are done")


def _cannot_write(run: RunDir, error: OSError) -> RunDirError:
    place = run.path.stat()
    try:
        group = grp.getgrgid(place.st_gid).gr_name
    except KeyError:
        group = str(place.st_gid)
    return RunDirError(
        f"{run.control}: {error.strerror or error}",
        hint=f"members of group {group} may write there; else ask {user_name(place.st_uid)}",
    )
