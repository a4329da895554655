"""Judges a verdict against what is known to be true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bigsci_launch.hang_lab.catalogue import RankSet, Reproduction
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology import Topology
from bigsci_launch.topology.naming import name_ranks


class Judgement(Enum):
    """How good a verdict is, best first. The last two must never happen."""

    RIGHT = "right"
    TOO_EARLY = "too early to say, points at the right rank"
    OTHER_CLASS = "other class"
    NOBODY_NAMED = "no rank named"
    UNKNOWN = "unknown"
    OTHER_STATE = "other state"
    FALSE_ALARM = "false alarm"
    WRONG_ACCUSATION = "wrong accusation"

    @property
    def is_right(self) -> bool:
        """Whether the verdict is right as far as it goes: a hang that has just begun may only be called a wait."""
        return self in (Judgement.RIGHT, Judgement.TOO_EARLY)

    @property
    def is_harmful(self) -> bool:
        """Whether acting on the verdict does damage."""
        return self in (Judgement.FALSE_ALARM, Judgement.WRONG_ACCUSATION)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The part of the answer of `bsl spy --json` that is compared."""

    state: State
    hang_class: HangClass | None
    suspects: RankSet
    claim: str
    confidence: float | None = None
    look_first: tuple[int, ...] = ()

    def __str__(self) -> str:
        named = f", {name_ranks(self.suspects)}" if self.suspects else ", no rank accused"
        return f"{self.state.value} {self.hang_class or '-'}{named}"


def read_verdict(document: Mapping[str, Any]) -> Verdict:
    """Return the verdict in a document of `bsl spy --json`."""
    verdict = document["verdict"]
    return Verdict(
        state=State(verdict["state"]),
        hang_class=HangClass.parse(verdict["class"]) if verdict["class"] else None,
        suspects=frozenset(suspect["rank"] for suspect in verdict["suspects"]),
        claim=verdict["claim"],
        confidence=verdict["confidence"],
        look_first=tuple(pointer["rank"] for pointer in verdict["look_first"]),
    )


def judge(verdict: Verdict, reproduction: Reproduction, culprit: int, topology: Topology) -> Judgement:
    allowed = reproduction.suspects(culprit, topology)
    if verdict.suspects - allowed:
        return Judgement.WRONG_ACCUSATION
    if verdict.state is State.HANG and not reproduction.is_hang:
        return Judgement.FALSE_ALARM
    if verdict.state is State.UNKNOWN:
        return Judgement.UNKNOWN
    if verdict.state is State.WAITING:
        return _judge_waiting(verdict, reproduction, allowed)
    if verdict.state not in reproduction.states:
        return Judgement.OTHER_STATE
    if reproduction.must_accuse and verdict.suspects != allowed:
        return Judgement.NOBODY_NAMED if not verdict.suspects else Judgement.OTHER_CLASS
    # If it is not a hang, no class has to be named.
    if verdict.hang_class not in reproduction.classes and (verdict.hang_class or reproduction.is_hang):
        return Judgement.OTHER_CLASS
    return Judgement.RIGHT


def _judge_waiting(verdict: Verdict, reproduction: Reproduction, allowed: RankSet) -> Judgement:
    """How good it is to say only that ranks wait: right of a slow job, and too early to say more of a hang."""
    if State.SLOW in reproduction.states:
        return Judgement.RIGHT
    if not reproduction.is_hang:
        return Judgement.UNKNOWN
    points_right = not reproduction.must_accuse or set(verdict.look_first[:1]) <= allowed
    return Judgement.TOO_EARLY if points_right else Judgement.NOBODY_NAMED


def expectation(reproduction: Reproduction, culprit: int, topology: Topology) -> str:
    """Return the right answer: `hang H10, rank 3 or none`."""
    ranks = reproduction.suspects(culprit, topology)
    accused = name_ranks(ranks) + ("" if reproduction.must_accuse else " or none")
    who = accused if ranks else "no rank accused"
    states = " or ".join(state.value for state in reproduction.states)
    return f"{states} {reproduction.classes[0]}, {who}"
