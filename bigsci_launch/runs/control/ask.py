"""Asking something of a run: what cannot come true is refused before it is written."""

from __future__ import annotations

import grp
import re

from bigsci_launch.config.schema.values import TRACED_CALL, TRACED_NAME
from bigsci_launch.errors import ConfigError, RunDirError
from bigsci_launch.procfs import user_name
from bigsci_launch.runs.attempts import query_attempt, read_job
from bigsci_launch.runs.control.request import Request, put_request, trace_request
from bigsci_launch.runs.control.requests import write_request
from bigsci_launch.runs.find import find_attempt, run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir, rank_files, read_json
from bigsci_launch.runs.signs import find_last_step, read_rank_events


def ask_run(run: RunDir, verb: str, why: str, after_step: int | None) -> AttemptDir:
    """Write a request for the newest attempt of a run, and return that attempt.

    Raises:
        RunDirError: the attempt has not begun or has ended, what is asked is not possible, or it cannot be written.
    """
    attempt = require_askable(run, verb, after_step)
    try:
        write_request(run, verb, why, after_step=after_step, attempt=attempt.name)
    except OSError as error:
        raise _cannot_write(run, error) from error
    return attempt


def require_askable(run: RunDir, verb: str, after_step: int | None) -> AttemptDir:
    """Return the newest attempt of a run.

    Raises:
        RunDirError: it has not begun or has ended, or what is asked is not possible.
    """
    attempt = find_attempt(run)
    _require_running(run, attempt)
    _require_possible(run, attempt, verb, after_step)
    return attempt


def _require_running(run: RunDir, attempt: AttemptDir) -> None:
    state, shown = query_attempt(attempt).state, run_argument(run)
    if state.is_queued:
        raise RunDirError(
            f"attempt {attempt.name} of {run.name} has not started: {state.value}",
            hint=f"`bsl cancel {shown}` removes it from the queue",
        )
    if state.is_over:
        queued = bool(run.queued_attempts())
        raise RunDirError(
            f"attempt {attempt.name} of {run.name} has ended: {state.value}",
            hint=f"`bsl cancel {shown}` removes the next one from the queue" if queued else f"see `bsl status {shown}`",
        )


def _require_possible(run: RunDir, attempt: AttemptDir, verb: str, after_step: int | None) -> None:
    record = read_job(attempt)
    if verb == "save" and record is not None and record.total_steps is None:
        raise RunDirError(
            f"only `bsl train` saves on request, and {run.name} runs another program",
            hint="`exit` and `restart` ask it to save and stop",
        )
    last = find_last_step(attempt, read_rank_events(attempt)) if after_step is not None else None
    if after_step is not None and last is not None and last.step >= after_step:
        raise RunDirError(f"step {after_step} of {run.name} has passed: {last.step} steps are done")


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


def parse_trace(include: str, from_step: int | None, from_call: str | None) -> Request:
    """Return the request to trace calls that options of the command line mean.

    Raises:
        ConfigError: a name is malformed, or two beginnings are given.
    """
    names = tuple(name.strip() for name in include.split(",") if name.strip())
    if wrong := [name for name in names if not re.fullmatch(TRACED_NAME, name)]:
        raise ConfigError(f"--include: {wrong[0]!r} is not a package name", hint="for example: --include my_package")
    if not names:
        raise ConfigError("--include names no package", hint="for example: --include my_package,__main__")
    if from_call is not None and not re.fullmatch(TRACED_CALL, from_call):
        raise ConfigError(
            f"--from-call: {from_call!r} is not a function", hint="write MODULE:FUNCTION, such as __main__:train_step"
        )
    if from_step is not None and from_call is not None:
        raise ConfigError("--from-step and --from-call are mutually exclusive", hint="use one of them")
    return trace_request(names, from_step, from_call)


def ask_to_trace(attempt: AttemptDir, request: Request) -> None:
    """Ask the ranks of a running attempt to trace calls.

    Raises:
        RunDirError: the attempt has ended, or its ranks keep no rings and look for no request.
    """
    run = attempt.path.parent.parent.name
    if query_attempt(attempt).state.is_over:
        raise RunDirError(f"run {run} has ended", hint=f"`bsl trace last {run}` shows what its ranks called last")
    if (why := _why_deaf(attempt)) is not None:
        raise RunDirError(f"the ranks of {run} keep no rings: {why}", hint="set monitor.ring to auto, and submit again")
    try:
        put_request(attempt, request)
    except OSError as error:
        raise RunDirError(f"{attempt.requests}: {(error.strerror or str(error)).lower()}") from error


def _why_deaf(attempt: AttemptDir) -> str | None:
    """Return why no rank looks for a request; None if one may."""
    records = [read_json(file) for file in rank_files(attempt.pids, ".json").values()]
    if not records or any(record.get("rings") for record in records):
        return None
    return str(records[0].get("why_no_rings"))
