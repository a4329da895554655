"""Explains a comparison: patterns in the differences, and differences between copies inside each side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigsci_launch.weights.compare.comparison import Comparison, WeightsFinding
from bigsci_launch.weights.compare.reading import require_numpy
from bigsci_launch.weights.files.sources import Weights
from bigsci_launch.weights.match.copies import has_copies
from bigsci_launch.weights.match.sharding import ShardingHints


def explain(comparison: Comparison, a: Weights, b: Weights) -> Comparison:
    """Add findings: patterns that the differences share, and faulty copies inside each side.

    Costs nothing if nothing differs and all copies agree.

    Raises:
        BslError: something differs, and numpy is not installed.
    """
    names = {difference.name for difference in comparison.differences} | comparison.apart
    if not names:
        return comparison
    require_numpy(f"{min(names)} differs")
    from bigsci_launch.weights.explain.patterns import find_patterns

    return find_patterns(replace(comparison, findings=(*comparison.findings, *_copies(comparison, a, b))))


def _copies(comparison: Comparison, a: Weights, b: Weights) -> list[WeightsFinding]:
    """Find drift between copies inside each side. Drift that A and B share is not a difference, so not a fault."""
    from bigsci_launch.weights.explain.drift import copy_findings

    hints = ShardingHints.of_metadata(a.metadata)
    sides = ((difference.name, difference.a or difference.b) for difference in comparison.differences)
    differing = {name for name, tensor in sides if tensor and has_copies(tensor, hints)}
    found = _of_both_sides(copy_findings(a, differing, "A"), copy_findings(b, differing, "B"))
    alike = comparison.apart - {difference.name for difference in comparison.differences}
    return found + [replace(_told(finding, finding), is_fault=False) for finding in copy_findings(a, set(alike), "A")]


def _of_both_sides(in_a: Sequence[WeightsFinding], in_b: Sequence[WeightsFinding]) -> list[WeightsFinding]:
    """Merge the findings of both sides; report shared ones once."""
    about_b = {(finding.pattern, finding.tensors, finding.places): finding for finding in in_b}
    told = [_told(finding, about_b.pop((finding.pattern, finding.tensors, finding.places), None)) for finding in in_a]
    names_in_a = {name for finding in in_a for name in finding.tensors}
    names_in_b = {name for finding in in_b for name in finding.tensors}
    found = [_equal_in(finding, "B") if not names_in_b & set(finding.tensors) else finding for finding in told]
    return found + [
        _equal_in(finding, "A") if not names_in_a & set(finding.tensors) else finding for finding in about_b.values()
    ]


def _told(in_a: WeightsFinding, in_b: WeightsFinding | None) -> WeightsFinding:
    """Return a finding about A; if B has the same one, reworded to cover both."""
    if in_b is None:
        return in_a
    return replace(in_a, claim=in_a.claim.replace("in A, ", "in both A and B, ", 1))


def _equal_in(finding: WeightsFinding, side: str) -> WeightsFinding:
    return replace(finding, claim=f"{finding.claim}; in {side} the copies are equal")
