"""Joins shards into tensors of the whole model, so that sides with different topologies can be compared.

Slices over dp (optimizer shards) are joined flat. Shards over tp are joined only if the two sides have different
numbers of them, along the dimension in which their shapes agree with a common whole. Weights over dp are replicas; they
are joined only if no shard, but their whole, has the other side's shape.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from bigsci_launch.weights.files.boxes import assemble
from bigsci_launch.weights.files.sources import CheckpointMetadata
from bigsci_launch.weights.files.tensors import (
    OPTIMIZER_ROLES,
    Chunk,
    Place,
    Segment,
    StoredTensor,
    TensorPair,
    TensorRole,
    cut_segments,
)
from bigsci_launch.weights.match.sharding import ShardingHints, is_replicated, matches

# Placeholder for an unknown shape: one dimension, so that a bias is recognized by its name alone.
UNKNOWN = (0,)
TensorKey = tuple[TensorRole, str]
# Where a copy of a parameter is: pp, dp, and its number among the files that state the same place (or none).
At = tuple[int | None, int | None, int]
# The copies of a parameter; each copy is a list of shards in tp order.
Copies = dict[At, list[StoredTensor]]


def join_dp(tensors: Sequence[StoredTensor], metadata: CheckpointMetadata) -> list[StoredTensor]:
    """Join the flat slices of each optimizer state over dp, in the parameter's shape; keep all other tensors."""
    slices: dict[tuple[TensorRole, str, int | None, int | None], list[StoredTensor]] = {}
    joined: list[StoredTensor] = []
    for tensor in tensors:
        if tensor.role in OPTIMIZER_ROLES and tensor.place.dp is not None:
            slices.setdefault((tensor.role, tensor.name, tensor.place.pp, tensor.place.tp), []).append(tensor)
        else:
            joined.append(tensor)
    for (role, name, pp, tp), pieces in slices.items():
        if len({piece.dtype for piece in pieces}) > 1:
            joined += pieces
            continue
        ordered = sorted(pieces, key=lambda piece: piece.place.dp or 0)
        segments = tuple(segment for piece in ordered for segment in piece.segments)
        length = sum(piece.num_elements for piece in ordered)
        shape = metadata.shapes.get(pp or 0, {}).get(name, (length,))
        whole = StoredTensor(name, role, Place(pp, tp), ordered[0].dtype, shape, segments)
        joined.append(whole if whole.num_elements == length else replace(whole, shape=(length,)))
    return joined


def pair_logically(
    a: Sequence[StoredTensor], b: Sequence[StoredTensor], hints: ShardingHints, lost: list[StoredTensor]
) -> Iterator[TensorPair]:
    """Pair the tensors of two sides by role and name. Every copy on each side is in at least one pair.

    Tensors that cannot be compared are appended to `lost`: shards without bytes cannot be joined.
    """
    left, right = _by_key(a), _by_key(b)
    shared = [(left[key], right[key]) for key in left.keys() & right.keys()]
    are_cut = _are_cut_over_dp(shared, hints)
    for key in dict.fromkeys([*left, *right]):
        if key in left and key in right:
            copies = _joined_to_fit(left[key], right[key], hints, are_cut)
            yield from _pair_copies(*copies, hints, lost)
        else:
            is_left = key in left
            for copy in (left if is_left else right)[key].values():
                yield from ((part, None) if is_left else (None, part) for part in copy)


def _by_key(tensors: Sequence[StoredTensor]) -> dict[TensorKey, Copies]:
    found: dict[TensorKey, Copies] = {}
    counts: Counter[tuple[TensorKey, Place]] = Counter()
    for tensor in tensors:
        key: TensorKey = (tensor.role, tensor.name)
        at = (tensor.place.pp, tensor.place.dp, counts[key, tensor.place])
        counts[key, tensor.place] += 1
        found.setdefault(key, {}).setdefault(at, []).append(tensor)
    for copies in found.values():
        for parts in copies.values():
            parts.sort(key=lambda part: -1 if part.place.tp is None else part.place.tp)
    return found


def _pair_copies(a: Copies, b: Copies, hints: ShardingHints, lost: list[StoredTensor]) -> Iterator[TensorPair]:
    used = set()
    for at_b, copy_b in b.items():
        at_a = _counterpart(at_b, a)
        used.add(at_a)
        yield from _pair_shards(a[at_a], copy_b, hints, _merged(at_b, at_a), lost)
    for at_a, copy_a in a.items():
        if at_a not in used:
            at_b = _counterpart(at_a, b)
            yield from _pair_shards(copy_a, b[at_b], hints, _merged(at_a, at_b), lost)


def _counterpart(at: At, others: Copies) -> At:
    """Return the copy at the same place, as far as the places are known; otherwise the first copy."""
    if at in others:
        return at
    alike = [other for other in others if _may_be_same(other, at)]
    return next((other for other in alike if other[2] == at[2]), next(iter(alike or others)))


def _may_be_same(x: At, y: At) -> bool:
    return all(i == j or i is None or j is None for i, j in zip(x[:2], y[:2], strict=True))


def _merged(first: At, second: At) -> Place:
    pp, dp = (i if i is not None else j for i, j in zip(first[:2], second[:2], strict=True))
    return Place(pp=pp, dp=dp)


def _are_cut_over_dp(copies: Iterable[tuple[Copies, Copies]], hints: ShardingHints) -> tuple[bool, bool]:
    """Whether each side's copies over dp are shards: those of some parameter fit the other side only if joined."""
    found = (False, False)
    for a, b in copies:
        joined = _joined_to_fit(a, b, hints, (False, False))
        found = (found[0] or joined[0] is not a, found[1] or joined[1] is not b)
    return found


def _joined_to_fit(a: Copies, b: Copies, hints: ShardingHints, are_cut: tuple[bool, bool]) -> tuple[Copies, Copies]:
    """Join the copies over dp of one side or of both if that gives them one shape; otherwise return the sides.

    The copies of a side that is known to be cut over dp are joined even if they have one shape as they are.
    """
    if not any(are_cut) and _fit(a, b, hints, may_join_replicas=False):
        return a, b
    sides = [
        [*_joined_over_dp(side), side] if is_cut else [side, *_joined_over_dp(side)]
        for side, is_cut in zip((a, b), are_cut, strict=True)
    ]
    for may_join_replicas in (False, True):
        for x, y in itertools.product(*sides):
            if _fit(x, y, hints, may_join_replicas=may_join_replicas):
                return x, y
    return a, b


def _fit(a: Copies, b: Copies, hints: ShardingHints, *, may_join_replicas: bool) -> bool:
    """Whether each copy has the shape of its counterpart, or can form a common whole with it.

    Unless `may_join_replicas`, parameters that every tp rank has whole by their names do not form one.
    """
    pairs = [(a[_counterpart(at, a)], copy) for at, copy in b.items()]
    pairs += [(copy, b[_counterpart(at, b)]) for at, copy in a.items()]
    return all(_fit_shards(x, y, hints, may_join_replicas=may_join_replicas) for x, y in pairs)


def _fit_shards(
    a: Sequence[StoredTensor], b: Sequence[StoredTensor], hints: ShardingHints, *, may_join_replicas: bool
) -> bool:
    if len(a) == len(b) and all(map(_may_have_one_shape, a, b)):
        return True
    whole = common_whole(a, b, hints)
    if whole is None or whole.dim is None or may_join_replicas:
        return whole is not None
    return not is_replicated(a[0].name, [part.shape for part in max(a, b, key=len)], hints)


def _joined_over_dp(copies: Copies) -> Iterator[Copies]:
    stages: dict[int | None, list[At]] = {}
    for at in sorted(copies, key=lambda at: (at[1] is not None, at[1] or 0, at[2])):
        stages.setdefault(at[0], []).append(at)
    parts = [part for copy in copies.values() for part in copy]
    if len(copies) == len(stages) or not all(part.has_bytes for part in parts):
        return
    for dim in range(len(parts[0].shape)):
        if all(_are_joinable(copies, held, dim) for held in stages.values()):
            yield {
                (pp, None, 0): [
                    replace(join_tp(shards, dim, ShardingHints(), Place(pp)), place=Place(pp, shards[0].place.tp))
                    for shards in zip(*(copies[at] for at in held), strict=True)
                ]
                for pp, held in stages.items()
            }


def _are_joinable(copies: Copies, held: Sequence[At], dim: int) -> bool:
    """Whether the copies at some places have shards on the same tp ranks, which differ in length along `dim` only."""
    if len({tuple(part.place.tp for part in copies[at]) for at in held}) != 1:
        return False
    for shards in zip(*(copies[at] for at in held), strict=True):
        kinds = {(part.dtype, len(part.shape), part.shape[:dim], part.shape[dim + 1 :]) for part in shards}
        if len(kinds) != 1:
            return False
    return True


def _pair_shards(
    a: list[StoredTensor], b: list[StoredTensor], hints: ShardingHints, place: Place, lost: list[StoredTensor]
) -> Iterator[TensorPair]:
    """Pair shard by shard if both sides are split alike; otherwise the joined wholes, or replica by replica."""
    if _are_foreign(a[0], b[0]):
        lost.append(a[0])
        return
    if len(a) == len(b) and all(_may_have_one_shape(x, y) for x, y in zip(a, b, strict=True)):
        for x, y in zip(a, b, strict=True):
            tp = x.place.tp if x.place.tp is not None else y.place.tp
            yield replace(x, place=replace(place, tp=tp)), y
        return
    whole = _whole_of_replicas(a, b, hints) or common_whole(a, b, hints)
    opaque = next((part for part in (*a, *b) if not part.has_bytes), None)
    if opaque is not None and (whole is None or whole.dim is not None):
        lost.append(opaque)
    elif whole is None:
        unpadded = _without_padding(a, b, hints, place)
        yield from [unpadded] if unpadded else _pair_in_order(a, b, place)
    elif whole.dim is None:
        yield from _pair_each(a, b, place)
    else:
        yield join_tp(a, whole.dim, hints, place), join_tp(b, whole.dim, hints, place)


def _pair_in_order(a: list[StoredTensor], b: list[StoredTensor], place: Place) -> Iterator[TensorPair]:
    """Pair shards that form no common whole. If not even the first ones have one shape, each has a partner."""
    if a[0].shape != b[0].shape:
        yield from _pair_each(a, b, place)
        return
    for x, y in zip_longest(a, b):
        yield x and replace(x, place=replace(place, tp=x.place.tp)), y


def _pair_each(a: list[StoredTensor], b: list[StoredTensor], place: Place) -> Iterator[TensorPair]:
    for index in range(max(len(a), len(b))):
        x, y = a[min(index, len(a) - 1)], b[min(index, len(b) - 1)]
        tp = (x if len(a) >= len(b) else y).place.tp
        yield replace(x, place=replace(place, tp=tp)), y


def _without_padding(
    a: list[StoredTensor], b: list[StoredTensor], hints: ShardingHints, place: Place
) -> TensorPair | None:
    """Pair only the vocabulary's own rows, because different tp sizes pad it to different lengths."""
    rows = hints.vocab_size
    if rows is None or not matches(hints.vocabulary, a[0].name):
        return None
    x, y = (join_tp(parts, 0, hints, place) for parts in (a, b))
    if x.shape[1:] != y.shape[1:] or min(x.shape[0], y.shape[0]) < rows or not (x.segments and y.segments):
        return None
    return _first_rows(x, rows), _first_rows(y, rows)


def _first_rows(tensor: StoredTensor, rows: int) -> StoredTensor:
    num_bytes = tensor.num_bytes // tensor.shape[0] * rows
    return replace(tensor, shape=(rows, *tensor.shape[1:]), segments=cut_segments(tensor.segments, 0, num_bytes))


def _are_foreign(x: StoredTensor, y: StoredTensor) -> bool:
    """Whether one has only a digest and the other only printed elements, so that they cannot be compared."""
    return any(one.digest is not None and not other.has_shape for one, other in ((x, y), (y, x)))


def _may_have_one_shape(x: StoredTensor, y: StoredTensor) -> bool:
    return x.shape == y.shape or not x.has_shape or not y.has_shape


def _whole_of_replicas(a: Sequence[StoredTensor], b: Sequence[StoredTensor], hints: ShardingHints) -> Whole | None:
    """Return the whole of a parameter of unknown shape if its name says that it is replicated over tp; else None."""
    shapes = [part.shape for part in (*a, *b) if part.has_shape]
    is_unknown = len(shapes) < len(a) + len(b)
    return Whole((), None) if is_unknown and is_replicated(a[0].name, shapes or [UNKNOWN], hints) else None


@dataclass(frozen=True, slots=True)
class Whole:
    """The shape of a whole parameter, and the dimension that is split; None if every rank has all of it."""

    shape: tuple[int, ...]
    dim: int | None


def common_whole(a: Sequence[StoredTensor], b: Sequence[StoredTensor], hints: ShardingHints) -> Whole | None:
    """Return a whole that the shards of both sides can form; None if there is none."""
    name = a[0].name
    wholes_b = {whole.shape for whole in _wholes(b, name, hints)}
    found = [whole for whole in _wholes(a, name, hints) if whole.shape in wholes_b]
    if not found:
        return None
    cut = next((whole.dim for whole in _wholes(b, name, hints) if whole.shape == found[0].shape), None)
    return replace(found[0], dim=found[0].dim if found[0].dim is not None else cut)


def _wholes(parts: Sequence[StoredTensor], name: str, hints: ShardingHints) -> list[Whole]:
    shape = parts[0].shape
    if len(parts) == 1:
        return [Whole(shape, None)]
    if len({len(part.shape) for part in parts}) > 1:
        return []
    found = [Whole(shape, None)] if len({part.shape for part in parts}) == 1 else []
    dims = range(len(shape))
    if len({len(part.shape) for part in parts}) != 1:
        return found
    for dim in reversed(dims) if matches(hints.by_row, name) else dims:
        others = {part.shape[:dim] + part.shape[dim + 1 :] for part in parts}
        if len(others) == 1:
            total = sum(part.shape[dim] for part in parts)
            found.append(Whole((*shape[:dim], total, *shape[dim + 1 :]), dim))
    return found


def join_tp(parts: Sequence[StoredTensor], dim: int, hints: ShardingHints, place: Place) -> StoredTensor:
    """Join shards along `dim`; a single shard is already whole."""
    first = parts[0]
    if len(parts) == 1:
        return replace(first, place=replace(place, tp=None))
    starts = list(itertools.accumulate((part.shape[dim] for part in parts), initial=0))
    shape = (*first.shape[:dim], starts[-1], *first.shape[dim + 1 :])
    whole = StoredTensor(first.name, first.role, replace(place, tp=None), first.dtype, shape, ())
    if dim == 0 and matches(hints.in_halves, first.name) and all(_is_plain(part) for part in parts):
        return replace(whole, segments=tuple(segment for segments in _halves(parts) for segment in segments))
    chunks = [
        Chunk(tuple(start if axis == dim else 0 for axis in range(len(shape))), part)
        for start, part in zip(starts[:-1], parts, strict=True)
    ]
    return assemble(whole, chunks)


def _is_plain(part: StoredTensor) -> bool:
    return bool(part.segments) and part.strides is None


def _halves(parts: Sequence[StoredTensor]) -> list[tuple[Segment, ...]]:
    """Return the first halves of all shards, then the second halves, for two parameters stored as one."""
    return [
        cut_segments(part.segments, half * part.num_bytes // 2, (half + 1) * part.num_bytes // 2)
        for half in range(2)
        for part in parts
    ]


def as_weights(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors with fp32 masters as weights, for a side that has no weights."""
    if any(tensor.role == "weight" for tensor in tensors):
        return list(tensors)
    return [replace(tensor, role="weight") if tensor.role == "fp32" else tensor for tensor in tensors]
