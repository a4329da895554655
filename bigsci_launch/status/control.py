"""What `bsl control` shows: what happens next with a request, and the results of earlier ones. Text and JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bigsci_launch.errors import RunDirError
from bigsci_launch.procfs import user_name
from bigsci_launch.runs.attempts import read_exit
from bigsci_launch.runs.chain.records import read_chain
from bigsci_launch.runs.control.request import Request
from bigsci_launch.runs.control.requests import moment_of, read_waiting
from bigsci_launch.runs.find import find_attempt, run_argument
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.runs.watching.heartbeat import WatcherHeartbeat, read_heartbeats
from bigsci_launch.runs.watching.ledger import BY_WATCHERS, Act, read_acts
from bigsci_launch.units import ago

SCHEMA_VERSION = 1
SHOWN = ("key", "verb", "who", "why", "after_step", "attempt", "asked")
COLUMNS = ("asked", "what", "who", "why", "state", "result")
NEXT = {
    "save": "all ranks save at the end of {when}",
    "exit": "all ranks save and stop at the end of {when}, and the run does not continue automatically; ranks that do "
    "not stop are examined and ended",
    "restart": "all ranks save and stop at the end of {when}, and the chain continues with its next start; ranks that "
    "do not stop are examined and ended",
    "dump": "the stacks of all ranks are collected, as by `bsl spy`",
    "kill": "the ranks get TERM at once and KILL soon after, and the run does not continue automatically",
}


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request and its state: `waiting` before a watcher has taken it up, then that of the act."""

    request: Request
    state: str
    words: str
    lines: tuple[Act, ...]


def serving(run: RunDir, attempt: AttemptDir, now: float) -> list[WatcherHeartbeat]:
    """Return the watchers that serve requests of the attempt, as far as their heartbeats show. Only a process of the
    attempt's owner can: no other user may signal the ranks."""
    return [
        heartbeat
        for heartbeat in read_heartbeats(run)
        if heartbeat.attempt == attempt.name and not heartbeat.ended and heartbeat.is_dead(now) is not True
    ]


def next_lines(run: RunDir, attempt: AttemptDir, verb: str, after_step: int | None, now: float) -> list[str]:
    """Return what happens next with a request that was just written."""
    when = f"step {after_step}" if after_step is not None else "the step in progress"
    lines = [f"next: {NEXT[verb].format(when=when)}"]
    heartbeats = serving(run, attempt, now)
    if not heartbeats:
        lines.append(
            f"no watcher runs for {run.name}: the request waits until its owner starts `bsl watch {run_argument(run)}`"
        )
    for heartbeat in heartbeats:
        late = f"; its newest heartbeat was {ago(heartbeat.time, now)}" if heartbeat.is_dead(now) is None else ""
        lines.append(
            f"{heartbeat.name} on {heartbeat.host} takes it up: it checks every {heartbeat.every_s:.3g} s{late}"
        )
    chain = read_chain(attempt)
    if verb == "restart" and (chain is None or chain.only_preempted):
        lines.append("the run does not restart automatically, since slurm.chain is not set: submit it again")
    return [*lines, f"see `bsl control {run_argument(run)}`"]


def read_all(run: RunDir) -> list[RequestState]:
    """Return everything that people have asked of a run, oldest first."""
    lines: dict[str, list[Act]] = {}
    for act in read_acts(run):
        if act.what not in BY_WATCHERS:
            lines.setdefault(act.key, []).append(act)
    found = [_of_acts(run, acts) for acts in lines.values()]
    return found + [RequestState(each, "waiting", each.wrong or "", ()) for each in read_waiting(run)]


def _of_acts(run: RunDir, acts: Sequence[Act]) -> RequestState:
    last = acts[-1]
    words = last.words
    ended = _exit_of(run, last.attempt) if last.state == "begun" and last.attempt else None
    if ended is not None and ended.get("exit_code") is not None:
        words = f"{words}; attempt {last.attempt} has ended since: {ended['reason']}"
    asked = moment_of(last.key) or acts[0].time
    request = Request(last.key, last.what, last.who, last.why, last.step, last.attempt, asked)
    return RequestState(request, last.state, words, tuple(acts))


def _exit_of(run: RunDir, attempt: str) -> dict[str, Any] | None:
    with suppress(RunDirError):
        return read_exit(find_attempt(run, attempt))
    return None


def rows(found: Sequence[RequestState]) -> list[tuple[str, ...]]:
    return [
        (
            time.strftime("%m-%d %H:%M:%S", time.localtime(each.request.asked)),
            _what(each.request),
            each.request.who,
            each.request.why,
            each.state,
            each.words,
        )
        for each in found
    ]


def _what(request: Request) -> str:
    step = request.after_step
    return f"{request.verb} after step {step}" if step is not None else request.verb


def just_asked(attempt: AttemptDir, verb: str, why: str, after_step: int | None, now: float) -> RequestState:
    """Return a request that this user has just written."""
    who = user_name(os.geteuid())
    return RequestState(Request("", verb, who, why, after_step, attempt.name, now), "waiting", "", ())


def control_document(
    run: RunDir, found: Sequence[RequestState], now: float, next_: Sequence[str] = ()
) -> dict[str, Any]:
    """Return requests as a document; `next_` is what happens with one that was just written."""
    requests = [
        {
            **{name: getattr(each.request, name) for name in SHOWN},
            "key": each.request.key or None,
            "state": each.state,
            "words": each.words,
            "lines": [{"time": act.time, "state": act.state, "words": act.words} for act in each.lines],
        }
        for each in found
    ]
    attempt = run.latest_attempt()
    watchers = serving(run, attempt, now) if attempt is not None else []
    return {
        "schema_version": SCHEMA_VERSION,
        "run": str(run.path),
        "requests": requests,
        "watchers": [
            {"name": heartbeat.name, "host": heartbeat.host, "last_sign": heartbeat.time, "every_s": heartbeat.every_s}
            for heartbeat in watchers
        ],
        "next": [*next_],
    }
