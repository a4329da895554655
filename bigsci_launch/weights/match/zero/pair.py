"""Pairs a DeepSpeed checkpoint with one that is cut otherwise: another stage, another number of ranks, a state dict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bigsci_launch.weights.files.sources import Weights
from bigsci_launch.weights.files.tensors import StoredTensor
from bigsci_launch.weights.match.batches import (
    OF_SINGLE_RANKS,
    OUTSIDE,
    ComparedSide,
    EntryPair,
    LeftOut,
    StoredEntry,
    left_out,
)
from bigsci_launch.weights.match.logical import pair_logically
from bigsci_launch.weights.match.sharding import ShardingHints
from bigsci_launch.weights.match.zero import DEEPSPEED
from bigsci_launch.weights.match.zero.forms import choose_forms
from bigsci_launch.weights.match.zero.state import pair_state

INCOMPLETE = "of parameters whose other shards could not be read"


@dataclass(frozen=True, slots=True)
class ZeroSide:
    """One side: its parameters in every form, its other entries, and whether one of its files could not be read."""

    side: ComparedSide
    weights: Weights
    parameters: Sequence[StoredTensor]
    extras: Sequence[StoredEntry]
    is_broken: bool


@dataclass
class ZeroPairs:
    """The pairs of two checkpoints, and what is not compared. `lost` cannot be joined."""

    pairs: list[EntryPair] = field(default_factory=list)
    omitted: list[LeftOut] = field(default_factory=list)
    lost: list[StoredTensor] = field(default_factory=list)


def pair_zero(a: ZeroSide, b: ZeroSide, hints: ShardingHints) -> ZeroPairs:
    """Pair all entries of two sides; at least one is a DeepSpeed or universal checkpoint."""
    found = ZeroPairs()
    left, right = _whole(a, found), _whole(b, found)
    forms = choose_forms(left, right, a.weights.metadata.shared, b.weights.metadata.shared)
    for xs, ys in forms.rounds:
        found.pairs += pair_logically(xs, ys, hints, found.lost)
    apart: list[tuple[ComparedSide, str, StoredEntry]] = [*forms.left_out]
    if a.weights.layout in DEEPSPEED and b.weights.layout in DEEPSPEED:
        is_same = a.weights.topology == b.weights.topology
        state = pair_state(a.extras, b.extras, why_rank=None if is_same else OF_SINGLE_RANKS)
        found.pairs += state.pairs
        apart += state.left_out
    else:
        apart += [(one.side, OUTSIDE, entry) for one in (a, b) for entry in one.extras]
    found.omitted += [left_out(side, why, entry) for side, why, entry in apart]
    return found


def _whole(side: ZeroSide, found: ZeroPairs) -> list[StoredTensor]:
    """Return the parameters without those that lack a shard."""
    whole = []
    for tensor in side.parameters:
        shape = side.weights.metadata.shapes.get(tensor.place.pp or 0, {}).get(tensor.name)
        if side.is_broken and shape is not None and tensor.role != "weight" and tensor.shape != shape:
            found.omitted.append(left_out(side.side, INCOMPLETE, tensor))
        else:
            whole.append(tensor)
    return whole
