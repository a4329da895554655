"""Process groups by what they are: which ranks belong to one, and what a set of ranks is called."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache

from bigsci_launch.topology import AXES, AXIS_NAMES, Topology, compress_ranks

WEIGHT_COPIES = "dp-cp"
"""The ranks that hold copies of the same weights, over which gradients are reduced: replicas, and their cp ranks."""
_OVER = {"model": ("tp", "pp"), WEIGHT_COPIES: ("cp", "dp")}
"""Groups over several axes."""
_WORDS = {
    **{axis.name: axis.words for axis in AXES},
    WEIGHT_COPIES: "data- and context-parallel",
    "tied": "tied-embedding",
    "model": "model-parallel",
}


def is_group_kind(text: str) -> bool:
    """Whether `text` is a kind of group that has a name."""
    return text == "world" or text in _WORDS


def group_members(kind: str, rank: int, world_size: int, topology: Topology | None) -> tuple[int, ...] | None:
    """The ranks of the group of `kind` (as `known_code.Reach`) that holds `rank`; None where that is not known."""
    if kind == "world":
        return _first_ranks(world_size)
    if topology is None or rank >= topology.world_size:
        return None
    if kind in AXIS_NAMES:
        return share(topology.group(kind, rank))
    if kind in _OVER:
        return share(topology.group_over(_OVER[kind], rank))
    return _stage_partners(kind, rank, topology)


def _stage_partners(kind: str, rank: int, topology: Topology) -> tuple[int, ...] | None:
    at = topology.coordinate(rank)
    partners = {
        "tied": {0, topology.pp - 1},
        "next stage": {at.pp_rank, at.pp_rank + 1},
        "previous stage": {at.pp_rank, at.pp_rank - 1},
    }.get(kind)
    if partners is None or at.pp_rank not in partners or not partners <= set(range(topology.pp)):
        return None
    first = rank - at.pp_rank * topology.stride("pp")
    return tuple(sorted(first + stage * topology.stride("pp") for stage in partners))


def reached_kind(kind: str, topology: Topology | None) -> str:
    """The kind of group that a known function of `kind` reaches: without context parallelism, copies are replicas."""
    return "dp" if kind == WEIGHT_COPIES and (topology is None or topology["cp"] == 1) else kind


def _kinds(topology: Topology | None) -> tuple[str, ...]:
    """Kinds of groups. A set of ranks may be several of these; the first that fits names it."""
    axes = tuple(axis for axis in AXIS_NAMES if topology is not None and axis in topology.axes)
    copies = (WEIGHT_COPIES,) if "cp" in axes else ()
    return (*axes, *copies, "tied", "model")


@lru_cache(maxsize=4)
def _first_ranks(count: int) -> tuple[int, ...]:
    return share(tuple(range(count)))


@lru_cache(maxsize=1 << 16)
def share(members: tuple[int, ...]) -> tuple[int, ...]:
    """`members`, and for equal ones the same tuple: thousands of ranks name the same group."""
    return members


def group_kind(members: Collection[int], world_size: int, topology: Topology | None) -> str | None:
    """What a set of ranks is: `world`, an axis, `dp-cp`, `tied`, `model`, or None."""
    if len(members) == world_size:
        return "world"
    if not members or topology is None:
        return None
    wanted = tuple(sorted(members))
    return next(
        (kind for kind in _kinds(topology) if group_members(kind, wanted[0], world_size, topology) == wanted), None
    )


def smallest_group(observed: Iterable[int], world_size: int, topology: Topology | None) -> tuple[int, ...] | None:
    """The smallest known group that holds all of `observed`: members of a group that not all have used yet."""
    seen = set(observed)
    if not seen:
        return None
    groups = [group_members(kind, min(seen), world_size, topology) for kind in (*_kinds(topology), "world")]
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
