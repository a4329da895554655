"""Audits one checkpoint: copies that must agree, masters and 16-bit weights, moments, optimizer groups, checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bigsci_launch.errors import CheckpointError
from bigsci_launch.progress import Progress, no_progress
from bigsci_launch.weights.compare.compare import EVERYTHING
from bigsci_launch.weights.compare.comparison import Comparison, Difference, Selection, WeightsFinding
from bigsci_launch.weights.explain.distributed import audit_distributed
from bigsci_launch.weights.explain.drift import Holdings, compare_pairs, describe, hold, with_moments, with_source
from bigsci_launch.weights.explain.health import broken_records, decayed_norms, lost_steps, mixed_steps, non_finite
from bigsci_launch.weights.explain.magnitudes import absurd_magnitudes, impossible_moments
from bigsci_launch.weights.files.pool import MANY_FILES, FilePool
from bigsci_launch.weights.files.sources import Weights
from bigsci_launch.weights.files.tensors import Place, StoredTensor
from bigsci_launch.weights.match.copies import CopyPair, dp_pairs, master_pairs, tied_pairs, tp_pairs
from bigsci_launch.weights.match.sharding import ShardingHints


def audit_weights(
    weights: Weights, *, selection: Selection = EVERYTHING, report_progress: Progress = no_progress
) -> Comparison:
    """Find what is inconsistent within one checkpoint or dump.

    The differences are between copies: `a` is the copy at the lowest index of the axis, `b` the other.

    Raises:
        CheckpointError: the checkpoint has no tensors, or none is selected.
    """
    holdings = hold(weights, selection, report_progress)
    if not holdings.tensors and not holdings.unreadable and not holdings.not_read:
        raise CheckpointError(f"{weights.path}: no tensor to audit", hint="see --include and --exclude")
    pairs = list(all_pairs(holdings.tensors, ShardingHints.of_metadata(weights.metadata)))
    files = FilePool(MANY_FILES)
    differences = compare_pairs(pairs, files)
    explained, source = with_moments(holdings, weights, {difference.name for difference in differences})
    findings = [
        *broken_records(weights.sources),
        *audit_distributed(weights.sources, holdings, files),
        *with_source(describe(differences, explained, files), source),
        *non_finite(holdings.tensors, files),
        *absurd_magnitudes(holdings.tensors, files),
        *impossible_moments(holdings.tensors, holdings.groups, files),
        *lost_steps(holdings.groups, weights.metadata),
        *mixed_steps(holdings.steps, weights.metadata),
        *decayed_norms(holdings.groups),
    ]
    files.close_all()
    return _as_comparison(weights, holdings, pairs, differences, findings)


def all_pairs(tensors: Sequence[StoredTensor], hints: ShardingHints) -> Iterator[CopyPair]:
    """Yield every pair of tensors that must agree."""
    yield from tied_pairs(tensors)
    yield from tp_pairs(tensors, hints)
    yield from dp_pairs(tensors)
    yield from master_pairs(tensors)


def _as_comparison(
    weights: Weights,
    holdings: Holdings,
    pairs: Sequence[CopyPair],
    differences: Sequence[Difference],
    findings: Sequence[WeightsFinding],
) -> Comparison:
    likely = {
        (name, place): finding.pattern for finding in findings for name in finding.tensors for place in finding.places
    }
    places: dict[str, set[Place]] = {}
    for tensor in holdings.tensors:
        places.setdefault(tensor.name, set()).add(tensor.place)
    return Comparison(
        a=weights.path,
        b=weights.path,
        num_compared=len(pairs),
        num_within_tolerance=0,
        num_bytes=sum(pair.other.num_bytes for pair in pairs if pair.other.has_bytes),
        differences=tuple(
            replace(difference, likely=likely.get((difference.name, difference.place))) for difference in differences
        ),
        unreadable=holdings.unreadable,
        not_read=holdings.not_read,
        places={name: frozenset(held) for name, held in places.items()},
        groups_a=holdings.groups,
        groups_b=holdings.groups,
        notes=weights.notes,
        findings=tuple(findings),
        is_audit=True,
    )
