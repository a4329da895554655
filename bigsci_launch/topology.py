"""Ranks and their coordinates on the tensor, pipeline and data axes.

Rank order is DeepSpeed's and Megatron's: tensor fastest, then data, then pipeline
(`PipeModelDataParallelTopology`, axes pipe, data, model). Pure values, standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Axis = Literal["tp", "pp", "dp"]
AXES: tuple[Axis, ...] = ("tp", "pp", "dp")


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """Where a rank stands: its index on each axis. Printed `dp0 pp3 tp1`."""

    dp_rank: int
    pp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"dp{self.dp_rank} pp{self.pp_rank} tp{self.tp_rank}"

    def as_dict(self) -> dict[str, int]:
        """The coordinate as `{"pp": .., "tp": .., "dp": ..}`, the form of every JSON report."""
        return {"pp": self.pp_rank, "tp": self.tp_rank, "dp": self.dp_rank}


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the three axes. `world_size` ranks, numbered with tp fastest, then dp, then pp."""

    tp: int
    pp: int
    dp: int

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} must be at least 1 (got {getattr(self, axis)})")

    @classmethod
    def parse(cls, text: str) -> Topology:
        """A topology from `tp=2,pp=2,dp=2` (any order, missing axes are 1).

        Raises:
            ValueError: an unknown axis, an axis given twice, or a size that is not a positive integer.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(tp|pp|dp)\s*=\s*([1-9][0-9]*)\s*", part)
            if match is None:
                raise ValueError(f"{part.strip()!r} is not AXIS=SIZE with AXIS one of tp, pp, dp")
            if match[1] in sizes:
                raise ValueError(f"{match[1]} is given twice")
            sizes[match[1]] = int(match[2])
        return cls(tp=sizes.get("tp", 1), pp=sizes.get("pp", 1), dp=sizes.get("dp", 1))

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of global rank `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Coordinate(dp_rank=dp_rank, pp_rank=pp_rank, tp_rank=tp_rank)

    def rank(self, coordinate: Coordinate) -> int:
        """The global rank at `coordinate`; the inverse of `coordinate`."""
        return (coordinate.pp_rank * self.dp + coordinate.dp_rank) * self.tp + coordinate.tp_rank

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that share a process group of `axis` with `rank`, in order of their index on that axis."""
        at = self.coordinate(rank)
        stride = {"tp": 1, "dp": self.tp, "pp": self.tp * self.dp}[axis]
        size: int = getattr(self, axis)
        first = rank - stride * getattr(at, f"{axis}_rank")
        return tuple(range(first, first + stride * size, stride))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Every process group of `axis`, ordered by first rank."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.world_size)}))

    def __str__(self) -> str:
        return f"tp={self.tp},pp={self.pp},dp={self.dp}"


def expand_ranks(text: str) -> tuple[int, ...]:
    """The ranks of a compressed list such as `0-3,7`: the inverse of `compress_ranks`.

    Raises:
        ValueError: it is not such a list.
    """
    ends = [part.partition("-")[::2] for part in text.split(",") if text]
    return tuple(rank for first, last in ends for rank in range(int(first), int(last or first) + 1))


def compress_ranks(ranks: Iterable[int]) -> str:
    """Ranks as a sorted compressed list: `0-3,7`. Duplicates count once; no ranks give an empty text."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
