"""What is compared with what, as values, and what is left out of the comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bigsci_launch.weights.files.sources import OptimizerGroup, Unreadable
from bigsci_launch.weights.files.tensors import (
    NOWHERE,
    NotRead,
    Place,
    StoredTensor,
    StoredValue,
    TensorPair,
    ValuePair,
)

# Size of a batch whose pairs do not come from one file.
PAIRS_AT_A_TIME = 256
ComparedSide = Literal["A", "B"]
StoredEntry = StoredTensor | StoredValue
EntryPair = tuple[StoredEntry | None, StoredEntry | None]

# Why entries that only one side can have are not compared.
OUTSIDE = "outside the model's weights"
OF_PROGRAM = "the code, options and constants of a program"
OF_SINGLE_RANKS = "of single ranks, whose topology the other side does not have"
PADDING = "of padding between and behind parameters"
LOST = "whose file could not be read on the other side"
NOT_READ = "which could not be read on the other side"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Entries of one side that are not compared, by number, and why."""

    side: ComparedSide
    why: str
    num_tensors: int = 0
    num_values: int = 0

    def __str__(self) -> str:
        other = "other " if self.why == OUTSIDE else ""
        counted = ((self.num_tensors, f"{other}tensor"), (self.num_values, "value"))
        counts = [f"{number:,} {word}{'s' * (number != 1)}" for number, word in counted if number]
        return f"{' and '.join(counts)} of {self.side}, {self.why}: not compared"


def left_out(side: ComparedSide, why: str, entry: StoredEntry) -> LeftOut:
    """Return the count of one entry."""
    is_tensor = isinstance(entry, StoredTensor)
    return LeftOut(side, why, int(is_tensor), int(not is_tensor))


def summed(counts: Iterable[LeftOut]) -> list[LeftOut]:
    """Add up the counts of the same side and the same reason."""
    totals: dict[tuple[ComparedSide, str], LeftOut] = {}
    for count in counts:
        before = totals.get((count.side, count.why), LeftOut(count.side, count.why))
        totals[count.side, count.why] = LeftOut(
            count.side, count.why, before.num_tensors + count.num_tensors, before.num_values + count.num_values
        )
    return sorted(totals.values(), key=lambda total: (total.side, total.why))


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Pairs that are compared together. None on one side means that only the other side has the tensor.

    `equal` names tensors at `place` that are already known to be equal. `not_read` are entries of either side that
    cannot be compared; `left_out` counts those that only one side can have. `owns_files`: no other batch needs its
    files.
    """

    title: str
    pairs: tuple[TensorPair, ...] = ()
    values: tuple[ValuePair, ...] = ()
    not_read: tuple[NotRead, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    groups: tuple[tuple[Place, tuple[OptimizerGroup, ...], tuple[OptimizerGroup, ...]], ...] = ()
    equal: tuple[str, ...] = ()
    place: Place = NOWHERE
    owns_files: bool = True
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()


def in_batches(
    pairs: Sequence[EntryPair],
    omitted: Sequence[LeftOut] = (),
    notes: Sequence[str] = (),
    *,
    not_read: Sequence[NotRead] = (),
    unreadable: Sequence[Unreadable] = (),
) -> Iterator[PairBatch]:
    """Yield pairs whose files other batches may need; the first batch has all values and everything else."""
    tensors, values = tensor_pairs(pairs), value_pairs(pairs)
    rest = PairBatch("", (), values, tuple(not_read), tuple(unreadable), (), owns_files=False)
    yield replace(rest, left_out=tuple(summed(omitted)), notes=tuple(notes))
    for start in range(0, len(tensors), PAIRS_AT_A_TIME):
        yield PairBatch("", tensors[start : start + PAIRS_AT_A_TIME], owns_files=False)


def tensor_pairs(pairs: Iterable[EntryPair]) -> tuple[TensorPair, ...]:
    return tuple(pair for pair in pairs if isinstance(pair[0] or pair[1], StoredTensor))  # type: ignore[misc]


def value_pairs(pairs: Iterable[EntryPair]) -> tuple[ValuePair, ...]:
    return tuple(pair for pair in pairs if isinstance(pair[0] or pair[1], StoredValue))  # type: ignore[misc]


def listed(names: Sequence[str], limit: int = 3) -> str:
    """Return `x, y and 7 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"
