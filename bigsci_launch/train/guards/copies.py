"""Which tensors on which ranks must be bitwise equal. Pure: names, topology and digests in, sentences out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bigsci_launch.topology import Topology
from bigsci_launch.topology.words import name_ranks_and_part

Digests = NDArray[np.int64]
CopyPlace = tuple[int, int]
"""A rank and one of its columns."""
AnyKey = TypeVar("AnyKey", bound=Hashable)
"""What names a group of copies."""

TIED = "tied_modules."
_CHECKS: dict[str, str] = {"dp": "data-parallel copies", "tp": "tensor-parallel copies", "pp": "tied copies"}


@dataclass(frozen=True, slots=True)
class Violation:
    """A finding of a guard. `ranks` are the ranks that are wrong; unless `is_decided`, one of them may be."""

    check: str
    tensor: str
    ranks: tuple[int, ...]
    text: str
    is_decided: bool = True
    """Whether the evidence accuses `ranks`. Two copies that differ do not say which of them is wrong."""

    @property
    def accused(self) -> tuple[int, ...]:
        """The ranks that the finding accuses; none if it is undecided."""
        return self.ranks if self.is_decided else ()


@dataclass(frozen=True, slots=True)
class Column:
    """A tensor that a rank digests, and the axes along which it is a copy."""

    name: str
    axes: tuple[str, ...]
    is_gradient: bool = False
    check: str | None = None
    """The name of the check, if it is not that of copies along an axis."""


@dataclass(frozen=True, slots=True)
class GroupKey:
    """What must be equal: a tensor along `axis`, at one place on the `others`; `check` names the reason."""

    check: str
    name: str
    axis: str
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopySplit:
    """Copies that differ: those that are wrong, or all if no majority says which; and a copy to compare with."""

    ranks: tuple[int, ...]
    reference: int
    is_decided: bool

    @property
    def text(self) -> str:
        """What is said of these ranks."""
        if self.is_decided:
            return f"differs from the copy on rank {self.reference}"
        return "differs between these ranks"


def find_split(copies: Mapping[int, Hashable], everywhere: Mapping[int, Hashable] | None = None) -> CopySplit | None:
    """Return the minority among the values of `copies`, by rank; None if all are equal.

    More than half of them must agree for the others to be wrong: of two copies, and of an even split, none is accused.
    `everywhere` has these copies and further ones of the same tensor, along other axes: the majority of all decides.
    """
    if len(set(copies.values())) < 2:
        return None
    for voters in (everywhere or copies, copies):
        usual, count = Counter(voters.values()).most_common(1)[0]
        if 2 * count > len(voters):
            right = [rank for rank, value in copies.items() if value == usual]
            reference = min(right or (rank for rank, value in voters.items() if value == usual))
            return CopySplit(tuple(sorted(copies.keys() - {*right})), reference, is_decided=True)
    return CopySplit(tuple(sorted(copies)), min(copies), is_decided=False)


class CopyGroups(Generic[AnyKey]):
    """Entries that must be equal, by group, found once: comparing a healthy table is a single comparison of arrays."""

    def __init__(self, groups: Mapping[AnyKey, Sequence[CopyPlace]]) -> None:
        self._groups = groups
        self._keys_at: dict[CopyPlace, list[AnyKey]] = defaultdict(list)
        pairs = [(places[0], place, key) for key, places in groups.items() for place in places[1:]]
        self._keys = [key for _, _, key in pairs]
        self._ones = np.array([one for one, _, _ in pairs], np.int64).reshape(-1, 2)
        self._others = np.array([other for _, other, _ in pairs], np.int64).reshape(-1, 2)

    def find_splits(self, table: Digests) -> Iterator[tuple[AnyKey, CopySplit, Mapping[int, int]]]:
        """Yield each group that differs in `table`, of shape (ranks, columns), and the values of all linked copies."""
        ones, others = (table[index[:, 0], index[:, 1]] for index in (self._ones, self._others))
        for key in dict.fromkeys(self._keys[number] for number in np.flatnonzero(ones != others)):
            everywhere = {rank: int(table[rank, number]) for rank, number in self._linked(key)}
            copies = {rank: everywhere[rank] for rank, _ in self._groups[key]}
            if (split := find_split(copies, everywhere)) is not None:
                yield key, split, everywhere

    def _linked(self, key: AnyKey) -> set[CopyPlace]:
        """Return the places that must be equal to those of a group, whichever axes lead there."""
        if not self._keys_at:
            for other, places in self._groups.items():
                for place in places:
                    self._keys_at[place].append(other)
        seen, due = {key}, [key]
        while due:
            further = {other for place in self._groups[due.pop()] for other in self._keys_at[place]} - seen
            seen |= further
            due += further
        return {place for each in seen for place in self._groups[each]}


# Several ranks have computed these together: if more than one of them finds a wrong value, any may have spoiled it.
_COMPUTED_TOGETHER = {"gradient norm", "gradient reduction", "loss gradient", "replicated gradients"}


def merge(found: Iterable[Violation]) -> list[Violation]:
    """Merge what several ranks, or several groups of copies, have found of the same tensor by the same check.

    What a majority has decided in one group stays decided: the other groups then only show that rank again.
    """
    together: dict[tuple[str, str], list[Violation]] = defaultdict(list)
    for violation in found:
        together[violation.check, violation.tensor].append(violation)
    return [_merge_same(same) for same in together.values()]


def _merge_same(same: Sequence[Violation]) -> Violation:
    decided = [each for each in same if each.is_decided]
    accused = {rank for each in decided for rank in each.ranks}
    is_explained = bool(decided) and all(accused & {*each.ranks} for each in same)
    told = decided if is_explained else same
    ranks = tuple(sorted({rank for each in told for rank in each.ranks}))
    is_decided = is_explained and (len(ranks) < 2 or told[0].check not in _COMPUTED_TOGETHER)
    return Violation(told[0].check, told[0].tensor, ranks, told[0].text, is_decided)


class CopyChecker:
    """The copies of a run."""

    def __init__(self, columns: Sequence[Sequence[Column]], topology: Topology) -> None:
        self._groups = CopyGroups(copy_groups(columns, topology))

    def find_unequal(self, digests: Digests) -> list[Violation]:
        """Return what differs in `digests`, of shape (ranks, columns): one violation per tensor and reason."""
        return merge(
            Violation(key.check, key.name, split.ranks, split.text, split.is_decided)
            for key, split, _ in self._groups.find_splits(digests)
        )


def copy_groups(columns: Sequence[Sequence[Column]], topology: Topology) -> dict[GroupKey, list[CopyPlace]]:
    """Return the entries that must be equal: all copies of a tensor along one axis."""
    groups: dict[GroupKey, list[CopyPlace]] = defaultdict(list)
    for rank, mine in enumerate(columns):
        at = topology.coordinate(rank)
        for number, column in enumerate(mine):
            for axis in column.axes:
                others = tuple(place for name, place in at.as_dict().items() if name != axis)
                groups[GroupKey(_check(axis, column), column.name, axis, others)].append((rank, number))
    return dict(groups)


def _check(axis: str, column: Column) -> str:
    return column.check or ("tied gradients" if column.is_gradient else _CHECKS[axis])


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
    """Sort violations so that causes come before their effects, and those that accuse before those that do not."""

    def place(each: Violation) -> tuple[int, bool]:
        return (_ORDER.index(each.check) if each.check in _ORDER else len(_ORDER)), not each.is_decided

    return sorted(violations, key=place)


def describe(violation: Violation, topology: Topology) -> str:
    """Return the violation as a sentence: check, tensor, ranks, finding."""
    where = name_ranks_and_part(violation.ranks, topology)
    return f"{violation.check}: {violation.tensor} on {where}: {violation.text}"
