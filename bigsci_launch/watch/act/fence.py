"""What a watcher that may act asks of the controller of `survive`: to kill the rank that holds up the others, or to
begin again with all ranks. The attempt does not end by it.

A request is claimed first, so that no other watcher repeats it, and written to the ledger before the controller can
read it. Its result is read from the controller's answer and its records, by any watcher.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from bigsci_launch.runs.control.request import OF_CONTROLLER, Request, put_request, read_answer, withdraw
from bigsci_launch.runs.generations.records import Generations, recoveries
from bigsci_launch.runs.generations.recovery_text import back_text
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.runs.watching.ledger import Act, RunFinding, claim, read_acts, record_act
from bigsci_launch.topology.naming import name_ranks

_NUMBER = re.compile(r"[0-9]{1,9}")
MOST_PER_STEP = 3
"""How often one step may be disturbed: the controller gives up after as many generations without a new one."""
UNANSWERED_S = 30.0
"""The controller answers within a second. One that has not after this long is gone, and so are its ranks soon."""


def recovery_request(
    attempt: AttemptDir, who: str, generation: int, ranks: Sequence[int], why: str, *, is_stopped: bool = False
) -> Request:
    """Return the request to fence the first of `ranks`, the suspects; without any, to begin again with all ranks.

    `why` is what was seen of the ranks. `is_stopped`: the process of the first one was stopped.
    """
    verb = "fence" if ranks else "begin_again"
    key, now = f"{verb}.{attempt.name}.{generation}", time.time()
    asked = Request(key, verb, who, why, attempt=attempt.name, asked=now, generation=generation)
    if ranks:
        asked = replace(asked, rank=ranks[0], others=tuple(ranks[1:]), failure="stopped" if is_stopped else "hung")
    return asked


def ask_controller(run: RunDir, attempt: AttemptDir, finding: RunFinding, request: Request) -> str:
    """Ask for one rank, or for all, once in a generation. Return what was asked; empty if another watcher has.

    Raises:
        OSError: it cannot be written down. Then nothing is asked.
    """
    known = _asked(run, attempt)
    key = f"{request.verb}:{attempt.name}:{request.generation}"
    if any(act.key == key for act in known):
        return ""
    at_step = {act.key for act in known if act.step == finding.step and act.state != "failed"}
    if len(at_step) >= MOST_PER_STEP:
        return f"no recovery was requested: this step was already disturbed {len(at_step)} times"
    if not claim(run, key, request.who):
        return ""
    words = _text(request)
    act = Act(key, request.verb, request.who, finding.sentence, "begun", words, attempt.name, finding.step)
    record_act(run, act)
    try:
        put_request(attempt, request)
    except OSError as error:
        record_act(run, replace(act, state="failed", words=f"cannot write the request: {error.strerror or error}"))
        raise
    return words


def _text(request: Request) -> str:
    if request.rank is None:
        return f"the controller is asked to end generation {request.generation} and to begin again"
    others = f"; {name_ranks(request.others)} will be killed too unless they leave" if request.others else ""
    return f"the controller is asked to fence rank {request.rank} in generation {request.generation}{others}"


def _generation(attempt: AttemptDir, act: Act) -> int | None:
    """Return the generation that a request is about; None if its key is not one of this attempt's."""
    what, *rest = act.key.split(":")
    is_ours = what == act.what and len(rest) == 2 and rest[0] == attempt.name
    return int(rest[1]) if is_ours and _NUMBER.fullmatch(rest[1]) else None


def _asked(run: RunDir, attempt: AttemptDir) -> list[Act]:
    latest = {act.key: act for act in read_acts(run) if act.what in OF_CONTROLLER}
    return [act for act in latest.values() if act.attempt == attempt.name and _generation(attempt, act) is not None]


def follow_recovery(run: RunDir, attempt: AttemptDir, found: Generations, now: float) -> Iterator[str]:
    """Record the results of requests that were open, and yield them. `now` is seconds since the epoch.

    Raises:
        OSError: the ledger cannot be written.
    """
    for act in _asked(run, attempt):
        if act.state == "begun" and (came := _outcome(attempt, act, found, now)) is not None:
            state, words = came
            record_act(run, replace(act, state=state, words=words, time=now))  # type: ignore[arg-type]
            yield f"{act.what.replace('_', ' ')}: {state}: {words}"


def _outcome(attempt: AttemptDir, act: Act, found: Generations, now: float) -> tuple[str, str] | None:
    number = _generation(attempt, act)
    if number is None:
        return None
    key = act.key.replace(":", ".")
    answer = read_answer(attempt, key)
    if answer is not None and answer.get("granted") is False:
        return "refused", str(answer.get("refused") or "the controller gave no reason")
    if found.gave_up is not None:
        return "done", f"the controller gave up: {found.gave_up}"
    back = next((each for each in recoveries(found) if each.failed.number == number), None)
    if back is not None and not found.is_recovering:
        return "done", f"generation {back.generation.number}: {back_text(back, has_phases=found.have_phases)}"
    if found.newest.number > number + 1 or found.is_over:
        return "done", f"generation {number} has ended"
    if answer is None and now - act.time > UNANSWERED_S:
        with suppress(OSError):
            withdraw(attempt, key)
        return "failed", f"no answer from the controller within {UNANSWERED_S:.0f} s"
    return None
