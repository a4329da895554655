"""From what differs to what it means: patterns over the differences, and the tied copies inside each side."""

from __future__ import annotations

from dataclasses import replace

from bigsci_launch.weights.compare import require_numpy
from bigsci_launch.weights.comparison import Comparison, Finding
from bigsci_launch.weights.sources import Weights

TIED = "tied_modules."


def explain(comparison: Comparison, a: Weights, b: Weights) -> Comparison:
    """The comparison with what its differences have in common. Costs nothing where nothing differs.

    Raises:
        BslError: something differs and numpy is not installed.
    """
    if not comparison.differences:
        return comparison
    require_numpy(f"{comparison.differences[0].name} differs")
    from bigsci_launch.weights.patterns import find_patterns

    return find_patterns(replace(comparison, findings=(*comparison.findings, *_tied(comparison, a, b))))


def _tied(comparison: Comparison, a: Weights, b: Weights) -> list[Finding]:
    """Drift between the tied copies of a side, for tied parameters that differ between the sides."""
    names = {difference.name for difference in comparison.differences if difference.name.startswith(TIED)}
    if not names:
        return []
    from bigsci_launch.weights.drift import tied_findings

    in_a, in_b = tied_findings(a, names, "A"), tied_findings(b, names, "B")
    about_b = {(finding.pattern, finding.tensors, finding.places): finding for finding in in_b}
    told = [_told(finding, about_b.pop((finding.pattern, finding.tensors, finding.places), None)) for finding in in_a]
    names_in_a = {name for finding in in_a for name in finding.tensors}
    names_in_b = {name for finding in in_b for name in finding.tensors}
    found = [_equal_in(finding, "B") if not names_in_b & set(finding.tensors) else finding for finding in told]
    return found + [
        _equal_in(finding, "A") if not names_in_a & set(finding.tensors) else finding for finding in about_b.values()
    ]


def _told(in_a: Finding, in_b: Finding | None) -> Finding:
    """A finding of side A, as one of both sides where B has the same."""
    if in_b is None:
        return in_a
    return replace(in_a, claim=in_a.claim.replace("in A, ", "in A and likewise in B, ", 1))


def _equal_in(finding: Finding, side: str) -> Finding:
    return replace(finding, claim=f"{finding.claim}; in {side} the copies are equal")
