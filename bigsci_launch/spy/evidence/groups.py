"""Process groups by what they are: which ranks belong to one, and what a set of ranks is called.

The scope of a communication is the ranks that it spans: an axis, `dp-cp` (the copies of the same weights), `model`
(one replica: tp x pp), `tied` (the stages that hold the tied embedding: first and last), `world`, or for point-to-point
calls `next stage` and `previous stage`. If the scope is unknown, the connections of the ranks may show that
every group is the world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from bigsci_launch.spy.evidence.kernel import Connections
from bigsci_launch.topology import AXES, AXIS_NAMES, Topology, UnevenTopology, compress_ranks

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


def is_scope(text: str) -> bool:
    return text == "world" or text in _WORDS


def group_members(scope: str, rank: int, world_size: int, topology: Topology | None) -> tuple[int, ...] | None:
    """Return the ranks of the group of this scope that holds `rank`, or None if it is not known."""
    if scope == "world":
        return _first_ranks(world_size)
    if topology is None or rank >= topology.world_size:
        return None
    if isinstance(topology, UnevenTopology):
        return _in_pipeline(scope, rank, topology)
    if scope in AXIS_NAMES:
        return share(topology.group(scope, rank))
    if scope in _OVER:
        return share(topology.group_over(_OVER[scope], rank))
    return _stage_partners(scope, rank, topology)


def _in_pipeline(scope: str, rank: int, topology: UnevenTopology) -> tuple[int, ...] | None:
    """Among pipelines of different depths: gradients are summed over the owners of a layer, which no place shows."""
    pipeline = topology.group("pp", rank)
    at = pipeline.index(rank)
    first = {"next stage": at, "previous stage": at - 1}.get(scope)
    if first is not None:
        return pipeline[first : first + 2] if 0 <= first < len(pipeline) - 1 else None
    if scope == "model":
        return share(topology.pipelines[topology.coordinate(rank).dp_rank].ranks)
    return share(topology.group(scope, rank)) if scope in ("tp", "pp") else None


def _stage_partners(scope: str, rank: int, topology: Topology) -> tuple[int, ...] | None:
    at = topology.coordinate(rank)
    partners = {
        "tied": {0, topology.pp - 1},
        "next stage": {at.pp_rank, at.pp_rank + 1},
        "previous stage": {at.pp_rank, at.pp_rank - 1},
    }.get(scope)
    if partners is None or at.pp_rank not in partners or not partners <= set(range(topology.pp)):
        return None
    first = rank - at.pp_rank * topology.stride("pp")
    return tuple(sorted(first + stage * topology.stride("pp") for stage in partners))


def scope_within(scope: str, topology: Topology | None) -> str:
    """Return what `scope` is in `topology`: without context parallelism, copies of weights are replicas."""
    return "dp" if scope == WEIGHT_COPIES and (topology is None or topology["cp"] == 1) else scope


def _group_scopes(topology: Topology | None) -> tuple[str, ...]:
    """The scopes of groups. A set of ranks may fit several; the first that fits names it."""
    axes = tuple(axis for axis in AXIS_NAMES if topology is not None and axis in topology.axes)
    copies = (WEIGHT_COPIES,) if "cp" in axes else ()
    return (*axes, *copies, "tied", "model")


@lru_cache(maxsize=4)
def _first_ranks(count: int) -> tuple[int, ...]:
    return share(tuple(range(count)))


@lru_cache(maxsize=1 << 16)
def share(members: tuple[int, ...]) -> tuple[int, ...]:
    """Return one shared tuple for equal `members`, because thousands of ranks name the same group."""
    return members


def scope_of(members: Collection[int], world_size: int, topology: Topology | None) -> str | None:
    """Return the scope of a set of ranks: `world`, an axis, `dp-cp`, `tied`, `model`, or None."""
    if len(members) == world_size:
        return "world"
    if not members or topology is None:
        return None
    wanted = tuple(sorted(members))
    return next(
        (scope for scope in _group_scopes(topology) if group_members(scope, wanted[0], world_size, topology) == wanted),
        None,
    )


def smallest_group(observed: Iterable[int], world_size: int, topology: Topology | None) -> tuple[int, ...] | None:
    """Return the smallest known group that holds all of `observed`; not every member may have used it yet."""
    seen = set(observed)
    if not seen:
        return None
    groups = [group_members(scope, min(seen), world_size, topology) for scope in (*_group_scopes(topology), "world")]
    fitting = [group for group in groups if group is not None and seen <= set(group)]
    return min(fitting, key=len, default=None)


def is_world_only(ranks: Sequence[Connections | None]) -> bool | None:
    """Whether all groups that ranks communicate over are groups of gloo that hold all of them.

    gloo connects each two members of a group, once for each group, and each group of a process listens at an address of
    its own. So they are if each rank listens for as many groups as each two ranks have connections. False: some share
    more connections than others. None where it is not known: a rank was not read, has a device open through which it
    may communicate, or listens for something else; two ranks are not connected; an unseen rank may be a member.

    `ranks` are the connections of each rank of the world. Those with the store, whose server listens on all addresses,
    are not counted.
    """
    links = _links_of_groups(ranks)
    if links is None:
        return None
    if max(links.values()) > min(links.values()):
        return False
    return True if {len(each.of_groups) for each in ranks if each} == set(links.values()) else None


def other_groups(ranks: Sequence[Connections | None]) -> dict[int, tuple[int, ...]]:
    """Return the members of the one group that a rank has besides the world, for each rank whose connections show that
    there is one: with each other member it has one connection more."""
    links = _links_of_groups(ranks) or {}
    if max(links.values(), default=0) > 2:
        return {}
    near = {rank: {rank} for rank in range(len(ranks))}
    for (one, other), count in links.items():
        if count == 2:
            near[one].add(other)
            near[other].add(one)
    return {
        rank: share(tuple(sorted(found)))
        for rank, found in near.items()
        if len(found) > 1 and all(near[other] == found for other in found)
    }


def _links_of_groups(ranks: Sequence[Connections | None]) -> Mapping[tuple[int, int], int] | None:
    """How many connections each two ranks have, if all of them are those of groups of gloo, as far as is known."""
    seen = [each for each in ranks if each is not None]
    owners = {address: rank for rank, each in enumerate(seen) for address in each.of_groups}
    if len(seen) < max(2, len(ranks)) or len(owners) < sum(len(each.of_groups) for each in seen):
        return None
    links = _links(seen, owners)
    is_known = links is not None and _share_only_a_store(seen, owners) and not any(each.devices for each in seen)
    return links if is_known else None


def _links(ranks: Sequence[Connections], owners: Mapping[str, int]) -> Mapping[tuple[int, int], int] | None:
    """How many connections each two ranks have, or None if that is not known, or if two have none."""
    links: Counter[tuple[int, int]] = Counter()
    came_in: Counter[str] = Counter()
    for rank, each in enumerate(ranks):
        for address, count in each.opened.items():
            if address in owners:
                links[min(rank, owners[address]), max(rank, owners[address])] += count
                came_in[address] += count
    is_whole = all(each.listening[address] == came_in[address] for each in ranks for address in each.of_groups)
    is_mesh = len(links) == len(ranks) * (len(ranks) - 1) // 2 and all(one != other for one, other in links)
    return links if is_whole and is_mesh else None


def _share_only_a_store(ranks: Sequence[Connections], owners: Mapping[str, int]) -> bool:
    """Whether all ranks share at most one address of none of them: a second may be a rank that was not seen."""
    shared = set.intersection(*(set(each.opened) for each in ranks)) - owners.keys()
    return len(shared) <= 1


def group_text(scope: str | None, members: Iterable[int] | None) -> str:
    """Return `the tensor-parallel group (ranks 4-5)`, `the world`, or `an unknown group`."""
    if scope == "world":
        return "the world"
    ranks = f" (ranks {compress_ranks(members)})" if members is not None else ""
    if scope in ("next stage", "previous stage"):
        return f"the {scope}{ranks}"
    if scope in _WORDS:
        return f"the {_WORDS[scope]} group{ranks}"
    return f"the group{ranks}" if ranks else "an unknown group"
