"""Finds finite numbers that no training leaves: absurd magnitudes, and moments that AdamW cannot have computed.

A flipped bit in an exponent makes 1e34 of 1e-4, which is finite, and which the next step turns into NaN everywhere.
`adam_limits` says how large the moments can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bigsci_launch.adam_limits import ABSURD, SLACK, UNDERFLOW, moment_bound
from bigsci_launch.topology.naming import agree
from bigsci_launch.weights.compare.comparison import WeightsFinding, names_text, title_of
from bigsci_launch.weights.compare.places import describe_places
from bigsci_launch.weights.compare.statistics import CHUNK, FLOATS, ranges
from bigsci_launch.weights.files.boxes import index_of
from bigsci_launch.weights.files.elements import Array, as_floats, read_elements
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.sources import OptimizerGroup
from bigsci_launch.weights.files.tensors import Place, StoredTensor, TensorRole

LARGEST: dict[TensorRole, float] = {"weight": ABSURD, "fp32": ABSURD, "exp_avg": ABSURD, "exp_avg_sq": ABSURD**2}
LOWEST = {"F32": -3.4028235e38, "BF16": -3.3895314e38, "F16": -65504.0, "F64": -1.7976931348623157e308}
"""The lowest number of a dtype: attention masks hold it."""


@dataclass(frozen=True, slots=True)
class Impossible:
    """Elements of a tensor that cannot be: how many, the largest magnitude among them, and where the first one is."""

    tensor: StoredTensor
    count: int
    largest: float
    first: int

    @property
    def text(self) -> str:
        """The elements in words: `2 elements up to 1e+34, the first at [3, 1]`."""
        at = list(index_of(self.first, self.tensor.shape))
        if self.count == 1:
            return f"1 element of {self.largest:.3g} at {at}"
        return f"{self.count:,} elements up to {self.largest:.3g}, the first at {at}"


def absurd_magnitudes(tensors: Sequence[StoredTensor], files: FilePool) -> Iterator[WeightsFinding]:
    """Yield one finding for all tensors with finite elements that are absurdly large."""
    held = [tensor for tensor in tensors if tensor.role in LARGEST and _has_floats(tensor)]
    found = [bad for tensor in held if (bad := _scan(tensor, _is_absurd(tensor), files))]
    if found:
        yield _finding("absurd magnitude", found, tensors, ", which no training leaves")


def impossible_moments(
    tensors: Sequence[StoredTensor], groups: Mapping[Place, Sequence[OptimizerGroup]], files: FilePool
) -> Iterator[WeightsFinding]:
    """Yield findings for second moments below zero, and for first moments that are too large for them."""
    second = {(tensor.name, tensor.place): tensor for tensor in tensors if tensor.role == "exp_avg_sq"}
    held = [tensor for tensor in second.values() if _has_floats(tensor)]
    if negative := [bad for tensor in held if (bad := _scan(tensor, lambda values, _: values < 0, files))]:
        yield _finding("negative second moment", negative, tensors, " below zero, but it is a mean of squares")
    found = []
    for tensor in tensors:
        squares = second.get((tensor.name, tensor.place))
        betas = _betas(tensor, groups) if tensor.role == "exp_avg" else None
        bound = moment_bound(betas) if betas else math.inf
        if math.isinf(bound) or squares is None or not (_has_floats(tensor) and _has_floats(squares)):
            continue
        if squares.num_elements == tensor.num_elements and (
            bad := _scan(tensor, _is_out_of_reach(squares, bound, files), files)
        ):
            found.append(bad)
    if found:
        tail = " too large for the second moment: no gradients lead AdamW there, unless its betas were changed"
        yield _finding("impossible moments", found, tensors, tail)


def _betas(tensor: StoredTensor, groups: Mapping[Place, Sequence[OptimizerGroup]]) -> tuple[float, float] | None:
    for place, held in groups.items():
        if (place.pp, place.tp) == (tensor.place.pp, tensor.place.tp):
            for group in held:
                if tensor.name in group.names:
                    return group.betas
    return None


def _has_floats(tensor: StoredTensor) -> bool:
    return tensor.dtype in FLOATS and tensor.has_bytes and tensor.num_elements > 0


IsImpossible = Callable[[Array, tuple[int, int]], Array]
"""Says for each of some values whether it cannot be; the range is that of their positions in the tensor."""


def _is_absurd(tensor: StoredTensor) -> IsImpossible:
    limit, lowest = LARGEST[tensor.role], LOWEST.get(tensor.dtype)

    def judge(values: Array, _: tuple[int, int]) -> Array:
        large = np.abs(values)
        if not large.max() > limit:
            return np.zeros(len(values), bool)
        is_mask = np.isclose(values, lowest, rtol=1e-6) if lowest is not None else False
        return np.asarray(np.isfinite(values) & (large > limit) & ~np.asarray(is_mask))

    return judge


def _is_out_of_reach(squares: StoredTensor, bound: float, files: FilePool) -> IsImpossible:
    def judge(values: Array, at: tuple[int, int]) -> Array:
        second = as_floats(read_elements(squares, *at, files), squares.dtype)
        reach = SLACK * bound * np.sqrt(np.maximum(second, 0)) + UNDERFLOW
        return np.asarray(np.isfinite(values) & np.isfinite(second) & (np.abs(values) > reach))

    return judge


@np.errstate(all="ignore")
def _scan(tensor: StoredTensor, judge: IsImpossible, files: FilePool) -> Impossible | None:
    count, largest, first = 0, 0.0, -1
    for start, stop in ranges(tensor.num_elements, CHUNK):
        values = as_floats(read_elements(tensor, start, stop, files), tensor.dtype).reshape(-1)
        bad = np.flatnonzero(judge(values, (start, stop)))
        if len(bad):
            count += len(bad)
            largest = max(largest, float(np.abs(values[bad]).max()))
            first = start + int(bad[0]) if first < 0 else first
    return Impossible(tensor, count, largest, first) if count else None


def _finding(pattern: str, found: Sequence[Impossible], tensors: Sequence[StoredTensor], tail: str) -> WeightsFinding:
    names = tuple(dict.fromkeys(title_of(bad.tensor.name, bad.tensor.role) for bad in found))
    places = tuple(dict.fromkeys(bad.tensor.place for bad in found))
    where = describe_places(places, places, {tensor.place for tensor in tensors})
    worst = max(found, key=lambda bad: bad.largest)
    head = f"{names_text(names)} {agree('has', len(names))}{' at most' if len(found) > 1 else ''} {worst.text}"
    return WeightsFinding(pattern, names, places, f"{head}{f' ({where})' if where else ''}{tail}")
