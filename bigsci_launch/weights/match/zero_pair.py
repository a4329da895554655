"""Pairs a DeepSpeed checkpoint with one that is cut otherwise: another stage, another number of ranks, a state dict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bigsci_launch.weights.files.sources import Weights
from bigsci_launch.weights.files.tensors import OPTIMIZER_ROLES, StoredTensor, TensorRole
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
from bigsci_launch.weights.match.zero_forms import choose_forms
from bigsci_launch.weights.match.zero_state import pair_state

INCOMPLETE = "of parameters with a shard that could not be read"


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
    lacking = _incomplete(a) | _incomplete(b)
    found.omitted += [
        left_out(one.side, INCOMPLETE, tensor)
        for one in (a, b)
        for tensor in one.parameters
        if (tensor.role, tensor.name) in lacking
    ]
    left, right = ([t for t in one.parameters if (t.role, t.name) not in lacking] for one in (a, b))
    forms = choose_forms(left, right, a.weights.metadata.shared, b.weights.metadata.shared)
    for xs, ys in forms.rounds:
        found.pairs += pair_logically(xs, ys, hints, found.lost)
    apart: list[tuple[ComparedSide, str, StoredEntry]] = [*forms.left_out]
    if a.weights.layout in DEEPSPEED and b.weights.layout in DEEPSPEED:
        one, other = a.weights, b.weights
        is_same_stage = one.layout == other.layout and one.metadata.zero.stage == other.metadata.zero.stage
        why_rank = None if one.topology == other.topology else OF_SINGLE_RANKS
        state = pair_state(a.extras, b.extras, is_same_stage=is_same_stage, why_rank=why_rank)
        found.pairs += state.pairs
        apart += state.left_out
    else:
        apart += [(one.side, OUTSIDE, entry) for one in (a, b) for entry in one.extras]
    found.omitted += [left_out(side, why, entry) for side, why, entry in apart]
    return found


def _incomplete(side: ZeroSide) -> set[tuple[TensorRole, str]]:
    metadata = side.weights.metadata
    held = {(tensor.role, tensor.name) for tensor in side.parameters}
    names = {name for groups in metadata.zero.groups.values() for group in groups for name in group}
    found: set[tuple[TensorRole, str]] = {(role, name) for role in OPTIMIZER_ROLES for name in names} - held
    for tensor in side.parameters:
        shape = metadata.shapes.get(tensor.place.pp or 0, {}).get(tensor.name)
        if shape is not None and tensor.role != "weight" and tensor.shape != shape:
            found.add((tensor.role, tensor.name))
    found |= {("weight", name) for role, name in found if role == "fp32" and ("weight", name) not in held}
    return found if side.is_broken else set()
