"""Finds tensors of one checkpoint that must agree: copies over pp, tp and dp; 16-bit weights and their masters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bigsci_launch.weights.files.tensors import PLACE_AXES, Place, StoredTensor, TensorRole
from bigsci_launch.weights.match.sharding import ShardingHints, is_replicated

Relation = Literal["tied copies", "tp replicas", "dp replicas", "16-bit and its master"]

# DeepSpeed's prefix for parameters that several stages share.
TIED = "tied_modules."


@dataclass(frozen=True, slots=True)
class CopyPair:
    """Two tensors that must be equal; `first` is the copy at the lowest index of the axis."""

    relation: Relation
    first: StoredTensor
    other: StoredTensor


def is_copied(tensor: StoredTensor, hints: ShardingHints) -> bool:
    """Whether ranks on another stage or tp index should have the same parameter."""
    return tensor.role in ("weight", "fp32") and has_copies(tensor, hints)


def has_copies(tensor: StoredTensor, hints: ShardingHints) -> bool:
    """Whether a parameter (or its optimizer state) is tied or replicated over tp, judged by its name."""
    return tensor.name.startswith(TIED) or is_replicated(tensor.name, [tensor.shape], hints)


def tied_pairs(tensors: Sequence[StoredTensor]) -> Iterator[CopyPair]:
    """Pair each copy on a later stage with the first stage's copy on the same tp and dp rank."""
    for group in _grouped(tensors, "pp"):
        yield from (CopyPair("tied copies", group[0], other) for other in group[1:])


def tp_pairs(tensors: Sequence[StoredTensor], hints: ShardingHints) -> Iterator[CopyPair]:
    """Pair each copy of a parameter that is replicated over tp with tp rank 0's copy."""
    for group in _grouped(tensors, "tp"):
        if is_replicated(group[0].name, [tensor.shape for tensor in group], hints):
            yield from (CopyPair("tp replicas", group[0], other) for other in group[1:])


def dp_pairs(tensors: Sequence[StoredTensor]) -> Iterator[CopyPair]:
    """Pair each weight with dp rank 0's copy of it."""
    for group in _grouped([tensor for tensor in tensors if tensor.role == "weight"], "dp"):
        yield from (CopyPair("dp replicas", group[0], other) for other in group[1:])


def master_pairs(tensors: Sequence[StoredTensor]) -> Iterator[CopyPair]:
    """Pair each 16-bit weight with every fp32 master of the same name on the same tp rank."""
    masters: dict[tuple[str, int | None], list[StoredTensor]] = {}
    for tensor in tensors:
        if tensor.role == "fp32":
            masters.setdefault((tensor.name, tensor.place.tp), []).append(tensor)
    for tensor in tensors:
        if tensor.role == "weight":
            for master in masters.get((tensor.name, tensor.place.tp), ()):
                if master.num_elements == tensor.num_elements:
                    yield CopyPair("16-bit and its master", master, tensor)


def _grouped(tensors: Sequence[StoredTensor], axis: str) -> Iterator[list[StoredTensor]]:
    """Group tensors whose places differ on one axis only, sorted by index on it; groups have two or more."""
    groups: dict[tuple[TensorRole, str, Place], list[StoredTensor]] = {}
    for tensor in tensors:
        if tensor.role != "other" and getattr(tensor.place, axis) is not None:
            groups.setdefault((tensor.role, tensor.name, _without(tensor.place, axis)), []).append(tensor)
    for group in groups.values():
        if len(group) > 1:
            yield sorted(group, key=lambda tensor: int(getattr(tensor.place, axis)))


def _without(place: Place, axis: str) -> Place:
    return Place(**{name: place[name] for name in PLACE_AXES if name != axis})
