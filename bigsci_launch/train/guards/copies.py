"""Which tensors on which ranks must be bitwise equal. Pure: names, ranks and digests in, findings out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bigsci_launch.topology import Topology
from bigsci_launch.train.rank.bits import as_number

Digests = NDArray[np.int64]
CopyPlace = tuple[int, int]
"""A rank and one of its columns."""
CopyAxes = tuple[tuple[str, tuple[int, ...]], ...]
"""The ranks that must have the same, each with the axis that says so."""

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
class Watched:
    """A value that ranks exchange: a digest, or the bits of a float if it `is_number`."""

    name: str
    copies: CopyAxes
    check: str | None = None
    """The name of the check, if it is not that of copies along an axis."""
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class CopySplit:
    """CopyAxes that differ: those that are wrong, or all if no majority says which; and a copy to compare with."""

    ranks: tuple[int, ...]
    reference: int
    is_decided: bool

    @property
    def text(self) -> str:
        """What is reported about these ranks."""
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


class _Group(NamedTuple):
    """CopyAxes along one axis; `check` names the reason why they must be equal."""

    check: str
    name: str
    axis: str
    ranks: tuple[int, ...]
    is_number: bool


class CopyChecker:
    """The copies of a run. `everywhere` is what each rank watches, in the order in which it sends the values."""

    def __init__(self, everywhere: Sequence[Sequence[Watched]]) -> None:
        self._groups: dict[_Group, list[CopyPlace]] = defaultdict(list)
        self._groups_at: dict[CopyPlace, list[_Group]] = defaultdict(list)
        for rank, mine in enumerate(everywhere):
            for number, watched in enumerate(mine):
                for axis, ranks in watched.copies:
                    check = watched.check or _CHECKS.get(axis, f"{axis} copies")
                    group = _Group(check, watched.name, axis, ranks, watched.is_number)
                    self._groups[group].append((rank, number))
                    self._groups_at[rank, number].append(group)
        # Found once: comparing a healthy table is then a single comparison of arrays.
        pairs = [(places[0], place, group) for group, places in self._groups.items() for place in places[1:]]
        self._pairs = [group for _, _, group in pairs]
        self._ones = np.array([one for one, _, _ in pairs], np.int64).reshape(-1, 2)
        self._others = np.array([other for _, other, _ in pairs], np.int64).reshape(-1, 2)

    def find_unequal(self, table: Digests) -> list[Violation]:
        """Return what differs in `table`, of shape (ranks, values): one violation per name and reason."""
        ones, others = (table[index[:, 0], index[:, 1]] for index in (self._ones, self._others))
        found = []
        for group in dict.fromkeys(self._pairs[number] for number in np.flatnonzero(ones != others)):
            everywhere = {rank: int(table[rank, number]) for rank, number in self._linked(group)}
            split = find_split({rank: everywhere[rank] for rank, _ in self._groups[group]}, everywhere)
            if split is not None:
                text = _number_text(split, everywhere) if group.is_number else split.text
                found.append(Violation(group.check, group.name, split.ranks, text, split.is_decided))
        return merge(found)

    def _linked(self, group: _Group) -> set[CopyPlace]:
        """Return the places that must be equal to those of a group, whichever axes lead there."""
        seen, due = {group}, [group]
        while due:
            further = {other for place in self._groups[due.pop()] for other in self._groups_at[place]} - seen
            seen |= further
            due += further
        return {place for each in seen for place in self._groups[each]}


def _number_text(split: CopySplit, values: Mapping[int, int]) -> str:
    usual = values[split.reference]
    apart = next(rank for rank in split.ranks if values[rank] != usual)
    return f"is {as_number(values[apart]):g} on rank {apart} and {as_number(usual):g} on rank {split.reference}"


def counted_once(everywhere: Sequence[Sequence[Watched]], topology: Topology, rank: int) -> set[str]:
    """Return the names that `rank` counts in a sum over all ranks, such that each shard is counted once.

    The first stage that holds a tensor counts it; if it is a copy over tp, only tp 0 does. Data-parallel ranks hold
    different parts of the gradients, so all of them count.
    """
    at = topology.coordinate(rank)
    earlier = [mine for other, mine in enumerate(everywhere) if topology.coordinate(other).pp_rank < at.pp_rank]
    known = {watched.name for mine in earlier for watched in mine}
    shards = [each for each in everywhere[rank] if at.tp_rank == 0 or "tp" not in dict(each.copies)]
    return {watched.name for watched in shards} - known


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


# Checks closer to the cause come first.
_ORDER = (
    *("data", "settings of layers", "optimizer groups", "load", "memory", "optimizer settings", "learning rate"),
    *("changed between steps", "optimizer step", "optimizer update", "non-finite", "missing gradients"),
    *("loss gradient", "layer gradients", "gradient reduction", "gradient norm", "clipping", "replicated gradients"),
    *("tied gradients", "reduced gradients", "magnitude", "moments", "padding", "skipped steps"),
)


def by_cause(violations: Iterable[Violation]) -> list[Violation]:
    """Sort violations: causes before effects, those that accuse before those that do not, few ranks before many."""

    def place(each: Violation) -> tuple[int, bool, int]:
        cause = _ORDER.index(each.check) if each.check in _ORDER else len(_ORDER)
        return cause, not each.is_decided, len(each.ranks)

    return sorted(violations, key=place)
