"""From what differs to what it means: patterns over the differences, and the tied copies inside each side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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

    with ThreadPoolExecutor(2) as pool:
        in_a, in_b = (tied_findings(weights, names, side, pool) for weights, side in ((a, "A"), (b, "B")))
    if in_a and not in_b:
        return [_with(finding, "in B the copies are equal") for finding in in_a]
    if in_b and not in_a:
        return [_with(finding, "in A the copies are equal") for finding in in_b]
    return [*in_a, *in_b]


def _with(finding: Finding, words: str) -> Finding:
    return replace(finding, claim=f"{finding.claim}; {words}")
