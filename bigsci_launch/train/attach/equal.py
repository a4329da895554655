"""Finds copies that differ. Pure: what is watched and a table of numbers in, findings out."""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bigsci_launch.train.attach.places import Members
from bigsci_launch.train.attach.watched import Watched
from bigsci_launch.train.guards.copies import Violation

_AXES = {"dp": "data-parallel copies", "tp": "tensor-parallel copies"}
_KINDS = {
    "gradient": "reduced gradients",
    "moment": "optimizer state copies",
    "setting": "optimizer settings",
    "tied": "tied copies",
}
Key = tuple[str, str, str, tuple[int, ...]]
"""Kind, name, axis and ranks of entries that must be equal."""


class EqualChecker:
    """All entries that must be equal, found once, so that a check of a healthy table is a single comparison."""

    def __init__(self, everywhere: Sequence[Sequence[Watched]]) -> None:
        self._entries: dict[Key, list[tuple[int, int]]] = defaultdict(list)
        for rank, mine in enumerate(everywhere):
            for number, watched in enumerate(mine):
                for axis, ranks in watched.copies:
                    self._entries[watched.kind, watched.name, axis, ranks].append((rank, number))
        pairs = [(entries[0], entry, key) for key, entries in self._entries.items() for entry in entries[1:]]
        self._keys = [key for _, _, key in pairs]
        self._ones = np.array([one for one, _, _ in pairs], np.int64).reshape(-1, 2)
        self._others = np.array([other for _, other, _ in pairs], np.int64).reshape(-1, 2)

    def find_unequal(self, table: NDArray[np.int64]) -> list[Violation]:
        """Return what differs in `table`, of shape (ranks, values): one violation per name and axis."""
        ones, others = (table[index[:, 0], index[:, 1]] for index in (self._ones, self._others))
        wrong = dict.fromkeys(self._keys[number] for number in np.flatnonzero(ones != others))
        return _merged([self._violation(key, table) for key in wrong])

    def _violation(self, key: Key, table: NDArray[np.int64]) -> Violation:
        kind, name, axis, _ = key
        values = {rank: int(table[rank, number]) for rank, number in self._entries[key]}
        usual, count = Counter(values.values()).most_common(1)[0]
        apart = tuple(sorted(rank for rank, value in values.items() if value != usual))
        reference = min(rank for rank, value in values.items() if value == usual)
        # Of two copies nobody can say which one is wrong.
        is_even = 2 * count <= len(values)
        suspects = tuple(sorted(values)) if is_even else apart
        check = _KINDS.get(kind) or _AXES.get(axis, f"{axis} copies")
        return Violation(check, name, suspects, _text(kind, values, apart, reference))


def _text(kind: str, values: dict[int, int], apart: Sequence[int], reference: int) -> str:
    if kind == "setting":
        wrong, usual = as_number(values[apart[0]]), as_number(values[reference])
        return f"is {wrong:g} on rank {apart[0]} and {usual:g} on rank {reference}"
    return "differs between these ranks" if len(values) == 2 else f"differs from the copy on rank {reference}"


def _merged(found: Sequence[Violation]) -> list[Violation]:
    merged: dict[tuple[str, str], Violation] = {}
    for each in found:
        known = merged.get((each.check, each.tensor))
        ranks = tuple(sorted({*each.ranks, *(known.ranks if known else ())}))
        merged[each.check, each.tensor] = Violation(each.check, each.tensor, ranks, (known or each).text)
    return list(merged.values())


def as_bits(number: float) -> int:
    """Return the bits of a float as a signed 64-bit integer, to be exchanged among digests."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def as_number(bits: int) -> float:
    """Return the float that `as_bits` made `bits` of."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


def find_wrong_data(data: Sequence[int], members: Sequence[Members]) -> Iterator[Violation]:
    """Find ranks that read the wrong samples; `data` are digests of a step's tokens by rank, 0 if not known.

    Data-parallel ranks read different samples, and the ranks of a tensor-parallel group the same.
    """
    for ranks in dict.fromkeys(groups["dp"] for groups in members if "dp" in groups):
        by_digest: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            by_digest[data[rank]].append(rank)
        for digest, same in by_digest.items():
            if digest and len(same) > 1:
                yield Violation("data", "batch", tuple(same), "these data-parallel ranks have read the same samples")
    for ranks in dict.fromkeys(groups["tp"] for groups in members if "tp" in groups):
        known = {data[rank] for rank in ranks if data[rank]}
        if len(known) > 1:
            yield Violation("data", "batch", ranks, "the ranks of a tensor-parallel group have read different samples")
