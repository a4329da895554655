"""From a question about weights to the answer: what is compared, explained and audited, and what a seam adds to it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bigsci_launch.errors import BslError
from bigsci_launch.progress import Progress, no_progress
from bigsci_launch.weights.compare.compare import EVERYTHING, compare_weights
from bigsci_launch.weights.compare.comparison import Comparison, Selection, with_finding
from bigsci_launch.weights.compare.reading import EVERY_BYTE, ReadPlan, require_numpy
from bigsci_launch.weights.explain.explain import explain
from bigsci_launch.weights.explain.seam import Seam, causes_in, seam_document, seam_finding
from bigsci_launch.weights.files.sources import Weights
from bigsci_launch.weights.show.report import as_document


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: two `sides` are compared, one is audited. Without any, the seam between two logs is the answer.

    `causes` are what records show of the restart at the seam. `may_fail`: the sides were not asked for, so that those
    that cannot be read are left out.
    """

    sides: tuple[Weights, ...] = ()
    selection: Selection = EVERYTHING
    tolerance: float | None = None
    plan: ReadPlan = EVERY_BYTE
    seam: Seam | None = None
    causes: tuple[str, ...] = ()
    may_fail: bool = False


@dataclass(frozen=True, slots=True)
class WeightsAnswer:
    """What was found, with the seam as its last finding, and the seam's part of the JSON document."""

    found: Comparison
    seam: dict[str, Any] | None = None

    @property
    def document(self) -> dict[str, Any]:
        return as_document(self.found, self.seam)


def answer_question(question: Question, report_progress: Progress = no_progress) -> WeightsAnswer:
    """Compare or audit what is asked about, explain it, and add what it says about the seam.

    Raises:
        BslError: the sides cannot be compared or audited, and they may not fail.
    """
    found = _looked_at(question, report_progress)
    if question.seam is None:
        assert found is not None, "a question without sides has a seam"
        return WeightsAnswer(found)
    causes = [*question.causes, *causes_in(found)]
    is_equal = found.is_equal if found and not found.is_audit else None
    finding = seam_finding(question.seam.loss, is_equal=is_equal, causes=causes)
    return WeightsAnswer(with_finding(found, finding), seam_document(question.seam, causes))


def _looked_at(question: Question, report_progress: Progress) -> Comparison | None:
    with suppress(*([BslError] if question.may_fail else [])):
        if len(question.sides) == 2:
            return _compared(*question.sides, question, report_progress)
        if len(question.sides) == 1:
            return _audited(question.sides[0], question, report_progress)
    return None


def _compared(a: Weights, b: Weights, question: Question, report_progress: Progress) -> Comparison:
    found = compare_weights(
        a,
        b,
        selection=question.selection,
        tolerance=question.tolerance,
        plan=question.plan,
        report_progress=report_progress,
    )
    # The patterns in a difference are those of whole tensors.
    return found if found.extent.is_sample else explain(found, a, b)


def _audited(weights: Weights, question: Question, report_progress: Progress) -> Comparison:
    require_numpy("an audit measures tensors")
    from bigsci_launch.weights.explain.audit import audit_weights

    return audit_weights(weights, selection=question.selection, report_progress=report_progress)
