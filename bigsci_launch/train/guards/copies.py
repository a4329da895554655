"""Which tensors on which ranks must be bitwise equal. Pure: names, topology and digests in, sentences out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigsci_launch.topology import Topology
from bigsci_launch.topology.words import name_ranks_and_part

Digests = NDArray[np.int64]

TIED = "tied_modules."
_CHECKS: dict[str, str] = {"dp": "data-parallel copies", "tp": "tensor-parallel copies", "pp": "tied copies"}


@dataclass(frozen=True, slots=True)
class Violation:
    """A finding of a guard. `ranks` are the ranks that are, or may be, wrong."""

    check: str
    tensor: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Column:
    """A tensor that a rank digests, and the axes along which it is a copy."""

    name: str
    axes: tuple[str, ...]
    is_gradient: bool = False
    check: str | None = None
    """The name of the check, if it is not that of copies along an axis."""


@dataclass(frozen=True, slots=True)
class ExpectedPair:
    """Two entries (rank, column) that must be equal; `check` names the reason."""

    check: str
    name: str
    one: tuple[int, int]
    other: tuple[int, int]


class CopyChecker:
    """All pairs of a run, found once, so that `find_unequal` is a single comparison of two arrays."""

    def __init__(self, columns: Sequence[Sequence[Column]], topology: Topology) -> None:
        self._pairs = tuple(expected_pairs(columns, topology))
        self._ones = np.array([pair.one for pair in self._pairs], np.int64).reshape(-1, 2)
        self._others = np.array([pair.other for pair in self._pairs], np.int64).reshape(-1, 2)

    def find_unequal(self, digests: Digests) -> list[Violation]:
        """Return what differs in `digests`, of shape (ranks, columns): one violation per tensor and reason."""
        ones, others = (digests[index[:, 0], index[:, 1]] for index in (self._ones, self._others))
        apart: dict[tuple[str, str], list[ExpectedPair]] = defaultdict(list)
        for number in np.flatnonzero(ones != others):
            pair = self._pairs[number]
            apart[pair.check, pair.name].append(pair)
        return [_violation(check, name, pairs) for (check, name), pairs in apart.items()]


def expected_pairs(columns: Sequence[Sequence[Column]], topology: Topology) -> Iterator[ExpectedPair]:
    """Yield the pairs that must be equal: every copy with the first copy of the same tensor."""
    firsts: dict[tuple[object, ...], tuple[int, int]] = {}
    for rank, mine in enumerate(columns):
        at = topology.coordinate(rank)
        for number, column in enumerate(mine):
            for axis in column.axes:
                others = tuple(place for name, place in at.as_dict().items() if name != axis)
                first = firsts.setdefault((axis, column.name, others), (rank, number))
                if first != (rank, number):
                    yield ExpectedPair(_check(axis, column), column.name, first, (rank, number))


def _check(axis: str, column: Column) -> str:
    return column.check or ("tied gradients" if column.is_gradient else _CHECKS[axis])


def _violation(check: str, name: str, pairs: Sequence[ExpectedPair]) -> Violation:
    ranks = sorted({pair.other[0] for pair in pairs})
    first = min(pair.one[0] for pair in pairs)
    return Violation(check, name, tuple(ranks), f"differs from the copy on rank {first}")


def holders(columns: Sequence[Sequence[Column]], topology: Topology) -> Mapping[str, int]:
    """Return the first pipeline stage that holds each tensor."""
    first: dict[str, int] = {}
    for rank, mine in enumerate(columns):
        stage = topology.coordinate(rank).pp_rank
        for column in mine:
            first[column.name] = min(stage, first.get(column.name, stage))
    return first


# Checks closer to the cause come first.
_ORDER = (
    "data",
    "settings of layers",
    "optimizer groups",
    "load",
    "memory",
    "optimizer settings",
    "learning rate",
    "optimizer step",
    "optimizer update",
    "loss gradient",
    "layer gradients",
    "gradient reduction",
    "gradient norm",
    "clipping",
    "replicated gradients",
    "tied gradients",
    "moments",
    "padding",
)


def by_cause(violations: Sequence[Violation]) -> list[Violation]:
    """Sort violations so that causes come before their effects."""
    return sorted(violations, key=lambda each: _ORDER.index(each.check) if each.check in _ORDER else len(_ORDER))


def describe(violation: Violation, topology: Topology) -> str:
    """Return the violation as a sentence: check, tensor, ranks, finding."""
    where = name_ranks_and_part(violation.ranks, topology)
    return f"{violation.check}: {violation.tensor} on {where}: {violation.text}"
