"""Compares a verdict with the truth, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigsci_launch.hang_lab.judgement import Judgement, Verdict, expectation, judge, read_verdict
from bigsci_launch.hang_lab.runner import Standing
from bigsci_launch.hang_lab.spying import spy

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class JudgedVerdict:
    """The verdict of `bsl spy` on a reproduction, and the right answer."""

    name: str
    title: str
    topology: str
    culprit: int
    expected: str
    verdict: Verdict
    judgement: Judgement

    @property
    def is_right(self) -> bool:
        return self.judgement.is_right

    def lines(self) -> list[str]:
        confidence = f" (confidence {self.verdict.confidence:.2f})" if self.verdict.confidence is not None else ""
        return [
            f"{self.name}: {self.title}, {self.topology}, culprit {self.culprit}",
            f"  expected   {self.expected}",
            f"  bsl spy    {self.verdict}{confidence}",
            f"             {self.verdict.claim}",
            f"  judgement  {self.judgement.value}",
        ]

    def document(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "class": self.name,
            "title": self.title,
            "topology": self.topology,
            "culprit": self.culprit,
            "expected": self.expected,
            "verdict": {
                "state": self.verdict.state.value,
                "class": str(self.verdict.hang_class) if self.verdict.hang_class else None,
                "suspects": sorted(self.verdict.suspects),
                "look_first": list(self.verdict.look_first),
                "confidence": self.verdict.confidence,
                "claim": self.verdict.claim,
            },
            "judgement": self.judgement.value,
        }


def compare(standing: Standing, *options: str) -> JudgedVerdict:
    """Run `bsl spy` with `options` on `standing`, and judge its verdict.

    Raises:
        LabError: `bsl spy` gives no verdict.
    """
    reproduction, culprit = standing.reproduction, standing.job.culprit
    verdict = read_verdict(spy(standing.run.path, *options))
    return JudgedVerdict(
        name=reproduction.name,
        title=reproduction.title,
        topology=str(standing.topology),
        culprit=culprit,
        expected=expectation(reproduction, culprit, standing.topology),
        verdict=verdict,
        judgement=judge(verdict, reproduction, culprit, standing.topology),
    )
