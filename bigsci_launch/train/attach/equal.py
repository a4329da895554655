"""Finds copies that differ. Pure: what is watched and a table of numbers in, findings out."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bigsci_launch.train.attach.places import Members
from bigsci_launch.train.attach.watched import Watched
from bigsci_launch.train.guards.copies import CopyGroups, CopySplit, Violation, find_split, merge

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
    """All entries that must be equal."""

    def __init__(self, everywhere: Sequence[Sequence[Watched]]) -> None:
        groups: dict[Key, list[tuple[int, int]]] = defaultdict(list)
        for rank, mine in enumerate(everywhere):
            for number, watched in enumerate(mine):
                for axis, ranks in watched.copies:
                    groups[watched.kind, watched.name, axis, ranks].append((rank, number))
        self._groups = CopyGroups(groups)

    def find_unequal(self, table: NDArray[np.int64]) -> list[Violation]:
        """Return what differs in `table`, of shape (ranks, values): one violation per name and axis."""
        return merge(_violation(*found) for found in self._groups.find_splits(table))


def _violation(key: Key, split: CopySplit, values: Mapping[int, int]) -> Violation:
    kind, name, axis, _ = key
    check = _KINDS.get(kind) or _AXES.get(axis, f"{axis} copies")
    text = _settings_text(values, split) if kind == "setting" else split.text
    return Violation(check, name, split.ranks, text, split.is_decided)


def _settings_text(values: Mapping[int, int], split: CopySplit) -> str:
    usual = values[split.reference]
    apart = next(rank for rank in split.ranks if values[rank] != usual)
    return f"is {as_number(values[apart]):g} on rank {apart} and {as_number(usual):g} on rank {split.reference}"


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
                text = "these data-parallel ranks have read the same samples"
                yield Violation("data", "batch", tuple(same), text, is_decided=False)
    for ranks in dict.fromkeys(groups["tp"] for groups in members if "tp" in groups):
        split = find_split(known) if (known := {rank: data[rank] for rank in ranks if data[rank]}) else None
        if split is not None:
            text = "the ranks of a tensor-parallel group have read different samples"
            yield Violation("data", "batch", split.ranks, text, split.is_decided)
