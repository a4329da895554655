"""What a watcher that may act asks of the controller of `survive`: to kill the rank that holds up the others, or to
begin again with all ranks. The attempt does not end by it.

A wish is claimed first, so that no other watcher repeats it, and written to the ledger before the controller can read
it. What came of it is read from the controller's answer and its records, by any watcher.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from bigsci_launch.errors import BslError
from bigsci_launch.runs.generations.records import Generations, recoveries
from bigsci_launch.runs.generations.words import back_words
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json, write_json
from bigsci_launch.runs.watching.ledger import Act, RunFinding, claim, read_acts, record_act
from bigsci_launch.topology.words import name_ranks

FENCE, BEGIN_AGAIN = "fence", "begin_again"
_NUMBER = re.compile(r"[0-9]{1,9}")
MOST_PER_STEP = 3
"""How often one step may be disturbed: the controller gives up after as many generations without a new one."""
UNANSWERED_S = 30.0
"""The controller answers within a second. One that has not after this long is gone, and so are its ranks soon."""


@dataclass(frozen=True, slots=True)
class RecoveryWish:
    """What is asked of a generation. `rank` is the one to kill; None: all ranks begin again, and none is blamed.

    `why` is what was seen of the ranks. `others` are further suspects: their agents kill those that do not leave.
    `is_stopped`: the process of the rank was stopped.
    """

    generation: int
    rank: int | None
    why: str
    others: tuple[int, ...] = ()
    is_stopped: bool = False

    @property
    def what(self) -> str:
        return FENCE if self.rank is not None else BEGIN_AGAIN

    def document(self, who: str, finding: RunFinding) -> dict[str, Any]:
        """Return the file that the controller reads."""
        common = {"generation": self.generation, "why": self.why, "who": who, "bundle": finding.bundle}
        if self.rank is None:
            return {"kind": "restart", **common}
        return {"kind": "fence", "rank": self.rank, "failure": "stopped" if self.is_stopped else "hung", **common}


def ask_controller(run: RunDir, attempt: AttemptDir, who: str, finding: RunFinding, wish: RecoveryWish) -> str:
    """Ask for one rank, or for all, once in a generation. Return what was asked; empty if another watcher has.

    Raises:
        OSError: it cannot be written down. Then nothing is asked.
    """
    known = _asked(run, attempt)
    key = f"{wish.what}:{attempt.name}:{wish.generation}"
    if any(act.key == key for act in known):
        return ""
    at_step = {act.key for act in known if act.step == finding.step and act.state != "failed"}
    if len(at_step) >= MOST_PER_STEP:
        return f"nothing is asked of the controller: this step was disturbed {len(at_step)} times"
    if not claim(run, key, who):
        return ""
    words = _words(wish)
    act = Act(key, wish.what, who, finding.sentence, "begun", words, attempt.name, finding.step)
    record_act(run, act)
    try:
        write_json(attempt.wishes / _file_name(wish.what, attempt, wish.generation), wish.document(who, finding))
    except OSError as error:
        record_act(run, replace(act, state="failed", words=f"the wish cannot be written: {error.strerror or error}"))
        raise
    return words


def _words(wish: RecoveryWish) -> str:
    if wish.rank is None:
        return f"the controller is asked to end generation {wish.generation} and to begin again"
    others = f"; {name_ranks(wish.others)} will be killed too unless they leave" if wish.others else ""
    return f"the controller is asked to fence rank {wish.rank} in generation {wish.generation}{others}"


def _file_name(what: str, attempt: AttemptDir, generation: int) -> str:
    return f"{what}.{attempt.name}.{generation}.json"


def _generation(attempt: AttemptDir, act: Act) -> int | None:
    """Return the generation that a wish is about; None if its key is not one of this attempt's."""
    what, *rest = act.key.split(":")
    is_ours = what == act.what and len(rest) == 2 and rest[0] == attempt.name
    return int(rest[1]) if is_ours and _NUMBER.fullmatch(rest[1]) else None


def _asked(run: RunDir, attempt: AttemptDir) -> list[Act]:
    """Return every wish of an attempt, each as it ended."""
    latest = {act.key: act for act in read_acts(run) if act.what in (FENCE, BEGIN_AGAIN)}
    return [act for act in latest.values() if act.attempt == attempt.name and _generation(attempt, act) is not None]


def follow_wishes(run: RunDir, attempt: AttemptDir, found: Generations, now: float) -> Iterator[str]:
    """Note what came of wishes that were not settled, and yield it. `now` is seconds since the epoch.

    Raises:
        OSError: the ledger cannot be written.
    """
    for act in _asked(run, attempt):
        if act.state == "begun" and (came := _outcome(attempt, act, found, now)) is not None:
            state, words = came
            record_act(run, replace(act, state=state, words=words, time=now))  # type: ignore[arg-type]
            yield f"{act.what.replace('_', ' ')}: {state}: {words}"


def _outcome(attempt: AttemptDir, act: Act, found: Generations, now: float) -> tuple[str, str] | None:
    """Return the state of an act and what came of it; None if that is not known yet."""
    number = _generation(attempt, act)
    if number is None:
        return None
    name = _file_name(act.what, attempt, number)
    answer = _answer(attempt, name)
    if answer is not None and answer.get("granted") is False:
        return "refused", str(answer.get("refused") or "the controller does not say why")
    if found.gave_up is not None:
        return "done", f"the controller gave up: {found.gave_up}"
    back = next((each for each in recoveries(found) if each.failed.number == number), None)
    if back is not None and not found.is_recovering:
        return "done", f"generation {back.generation.number}: {back_words(back, has_phases=found.have_phases)}"
    if found.newest.number > number + 1 or found.is_over:
        return "done", f"generation {number} has ended"
    if answer is None and now - act.time > UNANSWERED_S:
        with suppress(OSError):
            (attempt.wishes / name).unlink(missing_ok=True)
        return "failed", f"the controller has not answered for {UNANSWERED_S:.0f} s"
    return None


def _answer(attempt: AttemptDir, name: str) -> Mapping[str, Any] | None:
    try:
        document = read_json(attempt.wishes_done / name)
    except BslError:
        return None
    return document if isinstance(document, dict) else None
