"""Tensors of one checkpoint that must agree: copies over pp, tp and dp, and 16-bit weights with their masters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bigsci_launch.weights.files.tensors import PLACE_AXES, Place, StoredTensor, TensorRole
from bigsci_launch.weights.match.sharding import ShardingHints, is_replicated

Relation = Literal["tied copies", "tp replicas", "dp replicas", "16-bit and its master"]

# DeepSpeed's name for what several stages share.
TIED = "tied_modules."


@dataclass(frozen=True, slots=True)
class CopyPair:
    """Two tensors that must be equal: `other` against `first`, the copy at the lowest index of the axis."""

    relation: Relation
    first: StoredTensor
    other: StoredTensor


def is_copied(tensor: StoredTensor, hints: ShardingHints) -> bool:
    """Whether ranks of another stage or tp index should hold the same parameter."""
    return tensor.role in ("weight", "fp32") and has_copies(tensor, hints)


def has_copies(tensor: StoredTensor, hints: ShardingHints) -> bool:
    """Whether a parameter, or what the optimizer holds of it, is tied or replicated over tp, by its name."""
    return tensor.name.startswith(TIED) or is_replicated(tensor.name, [tensor.shape], hints)


def tied_pairs(tensors: Sequence[StoredTensor]) -> Iterator[CopyPair]:
    """Copies of one name on several stages, each against the first stage's on the same tp and dp rank."""
    for group in _grouped(tensors, "pp"):
        yield from (CopyPair("tied copies", group[0], other) for other in group[1:])


def tp_pairs(tensors: Sequence[StoredTensor], hints: ShardingHints) -> Iterator[CopyPair]:
    """Parameters that every tp rank holds whole, each against tp rank 0's."""
    for group in _grouped(tensors, "tp"):
        if is_replicated(group[0].name, [tensor.shape for tensor in group], hints):
            yield from (CopyPair("tp replicas", group[0], other) for other in group[1:])


def dp_pairs(tensors: Sequence[StoredTensor]) -> Iterator[CopyPair]:
    """Weights that every dp rank holds, each against dp rank 0's."""
    for group in _grouped([tensor for tensor in tensors if tensor.role == "weight"], "dp"):
        yield from (CopyPair("dp replicas", group[0], other) for other in group[1:])


def master_pairs(tensors: Sequence[StoredTensor]) -> Iterator[CopyPair]:
    """16-bit weights, each against every fp32 master of the same name on the same tp rank."""
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
    """Tensors that differ in their place on one axis alone, in order of their index; groups of two or more."""
    groups: dict[tuple[TensorRole, str, Place], list[StoredTensor]] = {}
    for tensor in tensors:
        if tensor.role != "other" and getattr(tensor.place, axis) is not None:
            groups.setdefault((tensor.role, tensor.name, _without(tensor.place, axis)), []).append(tensor)
    for group in groups.values():
        if len(group) > 1:
            yield sorted(group, key=lambda tensor: int(getattr(tensor.place, axis)))


def _without(place: Place, axis: str) -> Place:
    return Place(**{name: place[name] for name in PLACE_AXES if name != axis})
