"""Who holds which part of the state, and what has to be sent where. Pure, and apart from any engine's grid.

The state after a step consists of units. A unit is a flat vector of a known length, such as the optimizer state of one
group on one pipeline stage and tensor-parallel rank, or a document that cannot be cut. Ranks hold shards of units:
their own, and copies of another rank's. Nothing here knows why a unit is cut as it is, so another layout of the same
units only asks for other shards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """The elements [start, stop) of a unit."""

    unit: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, order=True)
class StateVersion:
    """A state that the run was in: after `step`, as the ranks of generation `line` computed it.

    A step that is done again by other ranks, or in another order of sums, is not the same state.
    """

    step: int
    line: int


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank holds of one state. `whole` gives the length of every unit of that state."""

    version: StateVersion
    shards: tuple[Shard, ...]
    whole: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A shard that `source` sends to `destination`; they may be the same rank."""

    shard: Shard
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Restorable:
    """The newest state that can be restored, or None, and why a newer one cannot be."""

    version: StateVersion | None
    why: str | None = None


MOST_EXCHANGED = 1024
"""Above this number of ranks, keepers are not exchanged: it takes the square of it."""

Manifest = Sequence[Holding]
"""Everything that one rank holds."""


def keepers(nodes: Sequence[str], replicas: Sequence[int]) -> list[int]:
    """Return for each rank the rank that keeps a copy of its state.

    `nodes` names each rank's node, and `replicas` its data-parallel replica. The keeper is on another node if there is
    one, and in another replica where that can be had too: then the state outlives a replica that leaves. Ranks are
    shifted cyclically in the order of their nodes. Where one node has more than half of all ranks, ranks elsewhere keep
    several copies. A rank that is alone is its own keeper.
    """
    seen = {node: place for place, node in reversed(list(enumerate(nodes)))}
    order = sorted(range(len(nodes)), key=lambda rank: (seen[nodes[rank]], rank))
    found = _shifted(order, nodes, replicas)
    for place, rank in enumerate(order):
        if len(seen) > 1 and nodes[found[rank]] == nodes[rank]:
            others = [other for other in order if nodes[other] != nodes[rank]]
            found[rank] = others[place % len(others)]
    _exchange(found, nodes, replicas)
    return found


def _shifted(order: Sequence[int], nodes: Sequence[str], replicas: Sequence[int]) -> list[int]:
    """Return the shift that leaves most ranks with a keeper on another node, and of those in another replica."""
    largest, number = max(Counter(nodes).values()), len(order)
    shifts = range(largest, min(number, 2 * largest + 1)) if largest < number else range(min(1, number - 1), number)
    best, most = list(order), (-1, -1)
    for shift in shifts:
        found = [0] * number
        for place, rank in enumerate(order):
            found[rank] = order[(place + shift) % number]
        elsewhere = sum(nodes[rank] != nodes[keeper] for rank, keeper in enumerate(found))
        apart = sum(replicas[rank] != replicas[keeper] for rank, keeper in enumerate(found))
        if (elsewhere, apart) > most:
            best, most = found, (elsewhere, apart)
    return best


def _exchange(found: list[int], nodes: Sequence[str], replicas: Sequence[int]) -> None:
    """Let ranks exchange their keepers where both then have one on another node and in another replica."""
    if len(found) > MOST_EXCHANGED or len(set(replicas)) == 1 or len(set(nodes)) == 1:
        return

    def is_apart(rank: int, keeper: int) -> bool:
        return nodes[rank] != nodes[keeper] and replicas[rank] != replicas[keeper]

    for rank in range(len(found)):
        if is_apart(rank, found[rank]):
            continue
        for other in range(len(found)):
            if is_apart(rank, found[other]) and is_apart(other, found[rank]):
                found[rank], found[other] = found[other], found[rank]
                break


def without(manifest: Manifest, version: StateVersion) -> list[Holding]:
    """Return what is held of other states."""
    return [holding for holding in manifest if holding.version != version]


def choose_version(manifests: Sequence[Manifest]) -> Restorable:
    """Return the newest state all of whose units are held; `manifests` are those of all ranks."""
    wholes: dict[StateVersion, list[Mapping[str, int]]] = defaultdict(list)
    for holding in _all_holdings(manifests):
        if holding.whole not in wholes[holding.version]:
            wholes[holding.version].append(holding.whole)
    why = None
    for version in sorted(wholes, reverse=True):
        holders = _holders(manifests, version)
        # The same state may have been cut in two ways, before and after the number of replicas changed.
        missing = [_find_missing(whole, holders) for whole in wholes[version]]
        if None in missing:
            return Restorable(version, why)
        why = why or f"no rank holds {missing[0]} of the state after step {version.step}"
    return Restorable(None, why or "no rank holds a snapshot")


def _all_holdings(manifests: Sequence[Manifest]) -> Iterator[Holding]:
    return (holding for manifest in manifests for holding in manifest)


def _holders(manifests: Sequence[Manifest], version: StateVersion) -> dict[str, list[tuple[int, int, int]]]:
    """Return who holds what of each unit, as (start, stop, rank)."""
    found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, manifest in enumerate(manifests):
        for holding in manifest:
            if holding.version == version:
                for shard in holding.shards:
                    found[shard.unit].append((shard.start, shard.stop, rank))
    return found


def _find_missing(whole: Mapping[str, int], holders: Mapping[str, list[tuple[int, int, int]]]) -> str | None:
    """Return the first unit that is not held completely."""
    for unit, length in whole.items():
        reached = 0
        for start, stop, _ in sorted(holders.get(unit, ())):
            if start > reached:
                break
            reached = max(reached, stop)
        if reached < length:
            return unit
    return None


def plan_transfers(
    manifests: Sequence[Manifest], version: StateVersion, wanted: Sequence[Iterable[Shard]]
) -> list[Transfer]:
    """Return what each rank gets from whom so that rank r has the shards `wanted[r]` of the state of `version`.

    What a rank holds itself is not sent. The rest is taken from those who send least, in an order that is the same on
    every rank. Parts of `wanted` that no rank holds are left out: they did not exist in that state.
    """
    holders = _holders(manifests, version)
    sent = [0] * len(manifests)
    plan = []
    for destination, shards in enumerate(wanted):
        for shard in shards:
            for piece, sources in _cut(shard, holders.get(shard.unit, ())):
                source = destination if destination in sources else min(sources, key=lambda rank: (sent[rank], rank))
                if source != destination:
                    sent[source] += piece.stop - piece.start
                plan.append(Transfer(piece, source, destination))
    return plan


def _cut(shard: Shard, held: Iterable[tuple[int, int, int]]) -> Iterator[tuple[Shard, set[int]]]:
    """Yield the pieces of a shard that the same ranks hold, with those ranks."""
    held = [each for each in held if each[0] < shard.stop and each[1] > shard.start]
    bounds = {shard.start, shard.stop}
    bounds |= {bound for each in held for bound in each[:2] if shard.start < bound < shard.stop}
    ordered = sorted(bounds)
    for start, stop in pairwise(ordered):
        sources = {rank for first, last, rank in held if first <= start and last >= stop}
        if sources:
            yield Shard(shard.unit, start, stop), sources
