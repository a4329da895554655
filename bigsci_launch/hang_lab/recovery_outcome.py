"""What became of a reproduction under `survive`, and whether that is right. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from bigsci_launch.hang_lab.catalogue import RankSet, Reproduction, Stand
from bigsci_launch.topology import Topology
from bigsci_launch.topology.naming import name_ranks

SCHEMA_VERSION = 1


class RecoveryJudgement(Enum):
    """How good it is, best first. The last one must never happen."""

    RECOVERED = "right: the hang was fenced, and the job finished"
    LEFT_ALONE = "right: nothing was fenced"
    OVERCOME = "right: ranks ended by themselves, and the job finished"
    TOO_EARLY = "too early: the last look accuses no rank yet, and none was fenced"
    NOBODY_FENCED = "no rank was fenced, although the last look accuses one"
    NOT_FINISHED = "the job did not finish"
    WRONGLY_FENCED = "an innocent rank was fenced"

    @property
    def is_right(self) -> bool:
        return self in (
            RecoveryJudgement.RECOVERED,
            RecoveryJudgement.LEFT_ALONE,
            RecoveryJudgement.OVERCOME,
            RecoveryJudgement.TOO_EARLY,
        )

    @property
    def is_harmful(self) -> bool:
        return self is RecoveryJudgement.WRONGLY_FENCED


@dataclass(frozen=True, slots=True)
class Fenced:
    """A rank that the controller killed because a watcher asked for it."""

    rank: int
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class RecoveryOutcome:
    """What happened: who was fenced, how many generations there were, how the job ended.

    `reason` and `exit_code` are None if it still ran after `seconds`; `accused` are the suspects of a last look then.
    `failures` are the causes of all ended generations, in words.
    """

    fenced: tuple[Fenced, ...]
    num_generations: int
    failures: tuple[str, ...]
    reason: str | None
    exit_code: int | None
    seconds: float
    accused: RankSet = frozenset()

    @property
    def has_finished(self) -> bool:
        return self.exit_code == 0


def has_certain_culprit(reproduction: Reproduction, culprit: int, topology: Topology) -> bool:
    """Whether the right verdict accuses a rank of a hang in which ranks are still there."""
    is_hang = reproduction.is_hang and reproduction.must_accuse
    return is_hang and reproduction.stand is not Stand.ALL_ENDED and bool(reproduction.suspects(culprit, topology))


def judge_recovery(
    outcome: RecoveryOutcome, reproduction: Reproduction, culprit: int, topology: Topology
) -> RecoveryJudgement:
    """Return how good it is: no innocent rank may be fenced, and none at all if nothing hangs."""
    allowed: RankSet = reproduction.suspects(culprit, topology) if reproduction.is_hang else frozenset()
    if any(each.rank not in allowed for each in outcome.fenced):
        return RecoveryJudgement.WRONGLY_FENCED
    if outcome.fenced:
        return RecoveryJudgement.RECOVERED if outcome.has_finished else RecoveryJudgement.NOT_FINISHED
    if outcome.num_generations > 1:
        return RecoveryJudgement.OVERCOME if outcome.has_finished else RecoveryJudgement.NOT_FINISHED
    if has_certain_culprit(reproduction, culprit, topology):
        return RecoveryJudgement.NOBODY_FENCED if outcome.accused else RecoveryJudgement.TOO_EARLY
    has_failed = outcome.exit_code is not None and outcome.exit_code != 0
    return RecoveryJudgement.NOT_FINISHED if has_failed else RecoveryJudgement.LEFT_ALONE


@dataclass(frozen=True, slots=True)
class JudgedRecovery:
    """The outcome of one reproduction, with what was right."""

    reproduction: Reproduction
    topology: Topology
    culprit: int
    outcome: RecoveryOutcome

    @property
    def judgement(self) -> RecoveryJudgement:
        return judge_recovery(self.outcome, self.reproduction, self.culprit, self.topology)

    @property
    def expected(self) -> str:
        ranks = self.reproduction.suspects(self.culprit, self.topology) if self.reproduction.is_hang else frozenset()
        if not ranks:
            return "no rank is fenced"
        if has_certain_culprit(self.reproduction, self.culprit, self.topology):
            return f"{name_ranks(ranks)} fenced, and the job finishes"
        return f"{name_ranks(ranks)} fenced, or none"

    def lines(self) -> list[str]:
        one, outcome = self.reproduction, self.outcome
        fenced = [f"rank {each.rank} in generation {each.generation}: {each.why}" for each in outcome.fenced]
        ended = "it still ran" if outcome.reason is None else f"{outcome.reason}, exit code {outcome.exit_code}"
        return [
            f"{one.name}: {one.title}, {self.topology}, culprit {self.culprit}",
            f"  expected   {self.expected}",
            *(f"  fenced     {text}" for text in fenced or ["none"]),
            *(f"  failure    {text}" for text in outcome.failures),
            f"  job        {outcome.num_generations} generations; {ended} after {outcome.seconds:.0f} s",
            f"  judgement  {self.judgement.value}",
        ]

    def document(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            "schema_version": SCHEMA_VERSION,
            "class": self.reproduction.name,
            "title": self.reproduction.title,
            "topology": str(self.topology),
            "culprit": self.culprit,
            "expected": self.expected,
            "fenced": [{"rank": each.rank, "generation": each.generation, "why": each.why} for each in outcome.fenced],
            "accused": sorted(outcome.accused),
            "num_generations": outcome.num_generations,
            "failures": list(outcome.failures),
            "reason": outcome.reason,
            "exit_code": outcome.exit_code,
            "seconds": round(outcome.seconds, 1),
            "judgement": self.judgement.name.lower(),
            "is_right": self.judgement.is_right,
        }
