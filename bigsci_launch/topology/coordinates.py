"""Ranks and their coordinates on the axes of parallelism.

Rank order is Megatron's, and for three axes DeepSpeed's too: tensor fastest, then context, expert, data, and pipeline
last (`PipeModelDataParallelTopology`, axes pipe, data, model).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bigsci_launch.topology.axes import AXIS_NAMES, WRITTEN
from bigsci_launch.topology.ranks import compress_ranks, expand_ranks

_ALWAYS_WRITTEN = tuple(axis.name for axis in reversed(WRITTEN) if axis.is_always_written)
PIPELINES = "pipelines="
"""What the text of an `UnevenTopology` begins with."""
TENSOR_PARALLEL = re.compile(r"tp=(\d+),")
"""What follows in its text, if stages have several ranks: not at the end, where a ring may have no room for it."""
_POSITIONS = {axis: position for position, axis in enumerate(AXIS_NAMES)}


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """The index of a rank on each axis of its topology. Printed `dp0 pp3 tp1`.

    `indices` belong to `axes`, in the order in which they are written; an axis that is not among them has size 1.
    """

    indices: tuple[int, ...]
    axes: tuple[str, ...] = _ALWAYS_WRITTEN

    @classmethod
    def at(cls, **indices: int) -> Coordinate:
        """The coordinate with these indices, 0 on the other axes: `Coordinate.at(dp=1, tp=1)`."""
        axes = tuple(axis.name for axis in reversed(WRITTEN) if axis.is_always_written or axis.name in indices)
        _require_known(indices)
        return cls(tuple(indices.get(axis, 0) for axis in axes), axes)

    def __getitem__(self, axis: str) -> int:
        if axis in self.axes:
            return self.indices[self.axes.index(axis)]
        _require_known((axis,))
        return 0

    @property
    def tp_rank(self) -> int:
        return self["tp"]

    @property
    def pp_rank(self) -> int:
        return self["pp"]

    @property
    def dp_rank(self) -> int:
        return self["dp"]

    def __str__(self) -> str:
        return " ".join(f"{axis}{index}" for axis, index in zip(self.axes, self.indices, strict=True))

    def as_dict(self) -> dict[str, int]:
        """The coordinate as `{"pp": .., "tp": .., "dp": ..}`, as in every JSON report; cp and ep where present."""
        return _document(dict(zip(self.axes, self.indices, strict=True)), ("pp", "tp", "dp"))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Topology:
    """The size of each axis. `world_size` ranks, numbered in the order of `AXES`, the first axis fastest.

    `sizes` are in the order of `AXES`. `axes` names those that texts and documents show, in the order of a coordinate:
    tp, pp and dp always, another one where its size is above 1.
    """

    sizes: tuple[int, ...]
    axes: tuple[str, ...] = field(compare=False)
    _steps: tuple[tuple[int, int], ...] = field(compare=False)
    """Stride and size of each of `axes`, kept because large jobs compute coordinates of every rank many times."""

    def __init__(self, tp: int = 1, pp: int = 1, dp: int = 1, **others: int) -> None:
        sizes = {"tp": tp, "pp": pp, "dp": dp, **others}
        _require_known(sizes)
        for axis, size in sizes.items():
            if size < 1:
                raise ValueError(f"{axis} must be at least 1 (got {size})")
        shown = (axis.name for axis in reversed(WRITTEN) if axis.is_always_written or sizes.get(axis.name, 1) > 1)
        object.__setattr__(self, "sizes", tuple(sizes.get(axis, 1) for axis in AXIS_NAMES))
        object.__setattr__(self, "axes", tuple(shown))
        object.__setattr__(self, "_steps", tuple((self.stride(axis), self[axis]) for axis in self.axes))

    @classmethod
    def parse(cls, text: str) -> Topology:
        """A topology from `tp=2,pp=2,dp=2` (any order, missing axes are 1), or the text of an `UnevenTopology`.

        Raises:
            ValueError: an unknown axis, an axis given twice, or a size that is not a positive integer.
        """
        if text.startswith(PIPELINES):
            return UnevenTopology.parse_pipelines(text)
        sizes: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*([a-z]+)\s*=\s*([1-9][0-9]*)\s*", part)
            if match is None or match[1] not in AXIS_NAMES:
                known = ", ".join(axis.name for axis in WRITTEN)
                raise ValueError(f"{part.strip()!r} is not AXIS=SIZE with AXIS one of {known}")
            if match[1] in sizes:
                raise ValueError(f"{match[1]} is given twice")
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    def __getitem__(self, axis: str) -> int:
        try:
            return self.sizes[_POSITIONS[axis]]
        except KeyError:
            _require_known((axis,))
            raise

    @property
    def tp(self) -> int:
        return self["tp"]

    @property
    def pp(self) -> int:
        return self["pp"]

    @property
    def dp(self) -> int:
        return self["dp"]

    @property
    def is_grid(self) -> bool:
        """Whether there is a rank at each product of indices, and ranks of one stage do the same work."""
        return True

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def kind_of(self, rank: int) -> int:
        """A number that ranks share if they do the same work: the stage."""
        return self.coordinate(rank).pp_rank

    def coordinate(self, rank: int) -> Coordinate:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")
        return Coordinate(tuple([rank // stride % size for stride, size in self._steps]), self.axes)

    def rank(self, coordinate: Coordinate) -> int:
        """The global rank at `coordinate`; the inverse of `coordinate`."""
        return self.rank_at(**dict(zip(coordinate.axes, coordinate.indices, strict=True)))

    def rank_at(self, **indices: int) -> int:
        """The global rank with these indices, 0 on the other axes: `rank_at(pp=3, tp=1)`."""
        _require_known(indices)
        return sum(index * self.stride(axis) for axis, index in indices.items())

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that share a process group of `axis` with `rank`, in order of their index on that axis."""
        stride, size = self.stride(axis), self[axis]
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + stride * size, stride))

    def group_over(self, axes: Iterable[str], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` on `axes` at most, in order: a group over several axes."""
        found: tuple[int, ...] = (rank,)
        for axis in axes:
            found = tuple(other for member in found for other in self.group(axis, member))
        return tuple(sorted(found))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Every process group of `axis`, ordered by first rank."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.world_size)}))

    def stride(self, axis: str) -> int:
        """How far apart two neighbours on `axis` are: the number of ranks on all faster axes together."""
        return math.prod(self.sizes[: AXIS_NAMES.index(axis)])

    def resized(self, **sizes: int) -> Topology:
        """The topology with other sizes for these axes."""
        return Topology(**{**dict(zip(AXIS_NAMES, self.sizes, strict=True)), **sizes})

    def as_dict(self) -> dict[str, int]:
        """The sizes as `{"tp": .., "pp": .., "dp": ..}`, as in every record; cp and ep where above 1."""
        return _document({axis: self[axis] for axis in self.axes}, ("tp", "pp", "dp"))

    @property
    def product(self) -> str:
        """`tp 2 x pp 2 x dp 2`, for sentences about the number of ranks."""
        return " x ".join(f"{axis} {self[axis]}" for axis in reversed(self.axes))

    @property
    def numbering(self) -> str:
        """`tp fastest, then dp, then pp`: the order in which ranks are numbered."""
        first, *others = (axis for axis in AXIS_NAMES if axis in self.axes)
        return ", then ".join((f"{first} fastest", *others))

    def __str__(self) -> str:
        return ",".join(f"{axis}={self[axis]}" for axis in reversed(self.axes))

    def __repr__(self) -> str:
        return f"Topology({self})"


class UnevenPlaces(NamedTuple):
    """The ranks of a pipeline, stage by stage, each with its tensor-parallel ranks; and its micro-batches of a step."""

    ranks: tuple[int, ...]
    micro_batches: int

    def __str__(self) -> str:
        return f"{compress_ranks(self.ranks)}x{self.micro_batches}"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class UnevenTopology(Topology):
    """Pipelines of different depths side by side. A pipeline is an index on dp, a stage one on pp; no grid is full.

    The ranks of a pipeline ascend from stage to stage. Printed `pipelines=0-1x4/2-4x4`: ranks, and micro-batches; with
    tensor parallelism `pipelines=tp=2,0-3x4/4-9x4`.
    """

    pipelines: tuple[UnevenPlaces, ...]
    _places: Mapping[int, tuple[int, int]] = field(compare=False)
    """The pipeline of each rank, and its index in it."""

    def __init__(self, pipelines: Iterable[tuple[Iterable[int], int]], tp: int = 1) -> None:
        found = tuple(UnevenPlaces(tuple(ranks), count) for ranks, count in pipelines)
        places = {rank: (index, at) for index, each in enumerate(found) for at, rank in enumerate(each.ranks)}
        if not places or sorted(places) != list(range(sum(len(each.ranks) for each in found))):
            raise ValueError("pipelines must hold each rank from 0 on once")
        if any(len(each.ranks) % tp for each in found):
            raise ValueError(f"each stage must have {tp} tensor-parallel ranks")
        Topology.__init__(self, tp=tp, pp=max(len(each.ranks) for each in found) // tp, dp=len(found))
        object.__setattr__(self, "pipelines", found)
        object.__setattr__(self, "_places", places)

    @classmethod
    def parse_pipelines(cls, text: str) -> UnevenTopology:
        """The topology that is printed as `text`.

        Raises:
            ValueError: it is no such text.
        """
        text = text.removeprefix(PIPELINES)
        tp = TENSOR_PARALLEL.match(text)
        parts = [part.partition("x") for part in text[tp.end() if tp else 0 :].split("/")]
        return cls(((expand_ranks(ranks), int(count)) for ranks, _, count in parts), int(tp[1]) if tp else 1)

    @property
    def is_grid(self) -> bool:
        return False

    @property
    def world_size(self) -> int:
        return len(self._places)

    def kind_of(self, rank: int) -> int:
        """The first rank at this stage of a pipeline of this depth, with as many micro-batches."""
        pipeline, at = self._places[rank]
        alike = self._kind(self.pipelines[pipeline])
        return min(each.ranks[at - at % self.tp] for each in self.pipelines if self._kind(each) == alike)

    def _kind(self, pipeline: UnevenPlaces) -> tuple[int, int]:
        return len(pipeline.ranks), pipeline.micro_batches

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks of the pipeline of `rank` with its tensor-parallel index, or those of its stage; on the other axes,
        no group follows from where ranks are."""
        pipeline, at = self._places[rank]
        ranks, lane = self.pipelines[pipeline].ranks, at % self.tp
        if axis == "tp":
            return ranks[at - lane : at - lane + self.tp]
        if axis != "pp":
            raise ValueError(f"pipelines of different depths have no groups of {axis}")
        return ranks[lane :: self.tp]

    def coordinate(self, rank: int) -> Coordinate:
        if rank not in self._places:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")
        pipeline, at = self._places[rank]
        return Coordinate.at(dp=pipeline, pp=at // self.tp, tp=at % self.tp)

    def __str__(self) -> str:
        tp = f"tp={self.tp}," if self.tp > 1 else ""
        return PIPELINES + tp + "/".join(map(str, self.pipelines))


def _document(values: Mapping[str, int], first: tuple[str, ...]) -> dict[str, int]:
    """`values` with the axes of `first` before the others."""
    order = (*first, *(axis for axis in AXIS_NAMES if axis not in first))
    return {axis: values[axis] for axis in order if axis in values}


def _require_known(axes: Iterable[str]) -> None:
    unknown = [axis for axis in axes if axis not in AXIS_NAMES]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not an axis; axes are {', '.join(AXIS_NAMES)}")
