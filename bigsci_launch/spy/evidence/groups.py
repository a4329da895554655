"""Process groups by what they are: which ranks belong to one, and what a set of ranks is called."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache

from bigsci_launch.topology import Coordinate, Topology, compress_ranks

_WORDS = {
    "tp": "tensor-parallel",
    "dp": "data-parallel",
    "pp": "pipeline-parallel",
    "tied": "tied-embedding",
    "model": "model-parallel",
}
# A set of ranks may be several of these; the first that fits names it.
_KINDS = ("tp", "dp", "pp", "tied", "model")


def group_members(kind: str, rank: int, world_size: int, topology: Topology | None) -> tuple[int, ...] | None:
    """The ranks of the group of `kind` (as `known_frames.Reach`) that holds `rank`; None where that is not known."""
    if kind == "world":
        return _first_ranks(world_size)
    if topology is None or rank >= topology.world_size:
        return None
    at = topology.coordinate(rank)
    if kind in ("tp", "dp", "pp"):
        return share(topology.group(kind, rank))  # type: ignore[arg-type]
    if kind == "model":
        stages = (topology.rank(Coordinate(at.dp_rank, stage, 0)) for stage in range(topology.pp))
        return share(tuple(rank for first in stages for rank in range(first, first + topology.tp)))
    partners = {
        "tied": {0, topology.pp - 1},
        "next stage": {at.pp_rank, at.pp_rank + 1},
        "previous stage": {at.pp_rank, at.pp_rank - 1},
    }.get(kind)
    if partners is None or at.pp_rank not in partners or not partners <= set(range(topology.pp)):
        return None
    return tuple(sorted(topology.rank(Coordinate(at.dp_rank, stage, at.tp_rank)) for stage in partners))


@lru_cache(maxsize=4)
def _first_ranks(count: int) -> tuple[int, ...]:
    return share(tuple(range(count)))


@lru_cache(maxsize=1 << 16)
def share(members: tuple[int, ...]) -> tuple[int, ...]:
    """`members`, and for equal ones the same tuple: thousands of ranks name the same group."""
    return members


def group_kind(members: Collection[int], world_size: int, topology: Topology | None) -> str | None:
    """What a set of ranks is: `world`, an axis, `tied`, `model`, or None."""
    if len(members) == world_size:
        return "world"
    if not members or topology is None:
        return None
    wanted = tuple(sorted(members))
    return next((kind for kind in _KINDS if group_members(kind, wanted[0], world_size, topology) == wanted), None)


def smallest_group(observed: Iterable[int], world_size: int, topology: Topology | None) -> tuple[int, ...] | None:
    """The smallest known group that holds all of `observed`: members of a group that not all have used yet."""
    seen = set(observed)
    if not seen:
        return None
    groups = [group_members(kind, min(seen), world_size, topology) for kind in (*_KINDS, "world")]
    fitting = [group for group in groups if group is not None and seen <= set(group)]
    return min(fitting, key=len, default=None)


def group_words(kind: str | None, members: Iterable[int] | None) -> str:
    """`the tensor-parallel group (ranks 4-5)`, `the world`, `a group that is not known`."""
    if kind == "world":
        return "the world"
    ranks = f" (ranks {compress_ranks(members)})" if members is not None else ""
    if kind in ("next stage", "previous stage"):
        return f"the {kind}{ranks}"
    if kind in _WORDS:
        return f"the {_WORDS[kind]} group{ranks}"
    return f"the group{ranks}" if ranks else "a group that is not known"
