"""Plans what nodes send each other after a loss, so that training can continue at the same step.

Units. A unit is a transformer layer, the embedding, or the head (the final norm, and an output matrix that is not
tied). The embedding is on the first stage, the head on the last. The weights of a tied embedding are on both. Node i of
a pipeline has the stages from i * stages_per_node to before (i + 1) * stages_per_node of the template of its size.

Weights. Every pipeline has the weights of every unit once, on the unit's owner. Those of a tied embedding are on two
nodes of a pipeline, or on one if its first and last stage are on one node.

State. fp32 weights and Adam's moments, 12 bytes per parameter, are sharded over the k pipelines as by ZeRO-1, each
unit by itself: the owner in pipeline j has the bytes from total * j // k to before total * (j + 1) // k. The state of a
tied embedding is on the first stage. Each shard is also in the host memory of its buddies, at the same step: the owners
of the unit in the next min(f, k - 1) pipelines, in a ring. So with k > f, f lost nodes never take a shard with them.

There are two phases, and the pipelines after the loss, k' of them, shard the state again. `now` must end before the
next step: weights and shards for their owners. `afterwards` makes the copies for the buddies, at the same step and
before old shards are freed; until it ends, one more loss may cost state. What a node has already, as owner or as buddy,
is not sent. A source is any surviving node that has the part, also one that is idle now, and in `afterwards` the new
owner. What no surviving node has is lost: it is not sent and has to come from a checkpoint.

Sources are levelled: parts that the same nodes have form a pool, and every pool is poured over its nodes until they are
equally loaded, round after round, until no node has more to send than some node has to receive. Nothing depends on the
order of a set, so every rank finds the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from typing import Literal

from bigsci_launch.plan.survive.cut import Counts
from bigsci_launch.plan.survive.reconfigure import Nodes, Pipelines

Kind = Literal["weights", "state"]

STATE_BYTES_PER_PARAMETER = 12
MAX_ROUNDS = 30
"""How often the sources are levelled at most. A load spreads slowly around a ring of buddies, but needs to only if no
target has to receive as much."""


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """The bytes of one copy of a unit's weights, and of its whole state over all pipelines."""

    name: str
    weights: int
    state: int

    @classmethod
    def of(cls, name: str, num_parameters: int, bytes_per_weight: int) -> UnitBytes:
        return cls(name, num_parameters * bytes_per_weight, num_parameters * STATE_BYTES_PER_PARAMETER)


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """The units of a model, in the order of its stages."""

    embedding: UnitBytes
    layers: tuple[UnitBytes, ...]
    head: UnitBytes
    tied: bool

    @property
    def units(self) -> tuple[UnitBytes, ...]:
        return (self.embedding, *self.layers, self.head)


@dataclass(frozen=True, slots=True)
class Send:
    """One message: the bytes [start, stop) of a unit's weights or state."""

    source: str
    target: str
    unit: str
    kind: Kind
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class LostPart:
    """The bytes [start, stop) of a unit's weights or state; no node that is left holds them."""

    unit: str
    kind: Kind
    start: int
    stop: int
    total: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    @property
    def share(self) -> Fraction:
        """How much of the unit's weights or state is lost."""
        return Fraction(self.num_bytes, self.total)


@dataclass(frozen=True)
class TransferPhase:
    """Messages that may all be under way at the same time."""

    sends: tuple[Send, ...]

    @cached_property
    def links(self) -> Mapping[tuple[str, str], int]:
        """Bytes by source and target."""
        found: dict[tuple[str, str], int] = {}
        for send in self.sends:
            link = send.source, send.target
            found[link] = found.get(link, 0) + send.stop - send.start
        return found

    @cached_property
    def bytes_out(self) -> Mapping[str, int]:
        return _totals((source, count) for (source, _), count in self.links.items())

    @cached_property
    def bytes_in(self) -> Mapping[str, int]:
        return _totals((target, count) for (_, target), count in self.links.items())

    @property
    def num_bytes(self) -> int:
        return sum(self.links.values())

    def seconds(self, bytes_per_second: float) -> float:
        """Return how long the busiest node needs if its link carries that much in each direction at the same time."""
        return max([0, *self.bytes_in.values(), *self.bytes_out.values()]) / bytes_per_second


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Both phases, what is lost, and how many nodes may fail once both have ended without any state being lost."""

    now: TransferPhase
    afterwards: TransferPhase
    lost: tuple[LostPart, ...]
    failures_left: int


def plan_transfer(
    before: Pipelines,
    after: Pipelines,
    lost: AbstractSet[str],
    templates: Mapping[int, Counts],
    stages_per_node: int,
    model: ModelBytes,
    failures: int,
    templates_after: Mapping[int, Counts] | None = None,
) -> TransferPlan:
    """Return which node sends what to which; `templates` are the layers of every stage by size, `failures` is f.

    The order of the pipelines counts: it says which interval each of them holds. `templates_after` are given if the
    pipelines have other templates after the loss.

    Raises:
        ValueError: there is no pipeline, a lost node is in one afterwards, a node is used twice, or a pipeline has no
            template that fits the model.
    """
    old = _Layout.of(before, templates, stages_per_node, model)
    new = _Layout.of(after, templates_after or templates, stages_per_node, model)
    dead = {node for nodes in after for node in nodes} & lost
    if dead:
        raise ValueError(f"{min(dead)} is lost, but is in a pipeline afterwards")
    now, afterwards = _Needs(), _Needs()
    gone: list[LostPart] = []
    for unit, was, becomes in zip(model.units, old.places, new.places, strict=True):
        weights = _survivors(was.weights, lost)
        shards = [_survivors(_ring(was.owners, shard, failures), lost) for shard in range(len(before))]
        gone += _lost_parts(unit, weights, shards)
        _need_weights(now, unit, weights, becomes.weights)
        _need_state(now, afterwards, unit, shards, becomes.owners, failures)
    return TransferPlan(now.sent(), afterwards.sent(), tuple(gone), min(failures, len(after) - 1))


def in_old_order(before: Pipelines, after: Pipelines) -> Pipelines:
    """Return the pipelines after a loss in the order of those that most of their nodes come from.

    A pipeline that keeps its position keeps its interval: in other orders several times as many bytes may move.
    """
    position = {node: index for index, nodes in enumerate(before) for node in nodes}

    def origin(nodes: Nodes) -> int:
        origins = Counter(position.get(node, len(before)) for node in nodes)
        return min(origins, key=lambda index: (-origins[index], index))

    return tuple(sorted(after, key=origin))


@dataclass(frozen=True, slots=True)
class _Places:
    """The owners of a unit, one in every pipeline, and all nodes that have its weights."""

    owners: Nodes
    weights: Nodes


@dataclass(frozen=True, slots=True)
class _Layout:
    places: tuple[_Places, ...]

    @classmethod
    def of(
        cls, pipelines: Pipelines, templates: Mapping[int, Counts], stages_per_node: int, model: ModelBytes
    ) -> _Layout:
        """Return the places of every unit, in the order of the model.

        Raises:
            ValueError: see `plan_transfer`.
        """
        if not pipelines:
            raise ValueError("there is no pipeline")
        uses = Counter(node for nodes in pipelines for node in nodes)
        twice = [node for node, count in uses.items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]} is used twice")
        sizes = sorted({len(nodes) for nodes in pipelines})
        rows = {size: _node_of_units(size, templates, stages_per_node, len(model.layers)) for size in sizes}
        by_pipeline = [[nodes[node] for node in rows[len(nodes)]] for nodes in pipelines]
        places = [_Places(owners, owners) for owners in zip(*by_pipeline, strict=True)]
        if model.tied:
            both = dict.fromkeys((*places[0].owners, *places[-1].owners))
            places[0] = _Places(places[0].owners, tuple(both))
        return cls(tuple(places))


def _node_of_units(
    size: int, templates: Mapping[int, Counts], stages_per_node: int, num_layers: int
) -> tuple[int, ...]:
    """Return the index, in a pipeline of `size` nodes, of the node of every unit."""
    counts = templates.get(size)
    if counts is None:
        raise ValueError(f"no template has {size} nodes")
    if len(counts) != size * stages_per_node or sum(counts) != num_layers:
        raise ValueError(
            f"the template of {size} nodes has {len(counts)} stages and {sum(counts)} layers; "
            f"it needs {size * stages_per_node} stages and {num_layers} layers"
        )
    layers = [stage // stages_per_node for stage, count in enumerate(counts) for _ in range(count)]
    return (0, *layers, size - 1)


def _ring(owners: Nodes, shard: int, failures: int) -> Nodes:
    """Return the owner of a shard, and its buddies."""
    return tuple(owners[(shard + offset) % len(owners)] for offset in range(min(failures + 1, len(owners))))


def _survivors(nodes: Nodes, lost: AbstractSet[str]) -> Nodes:
    return tuple(node for node in nodes if node not in lost)


def _cut_positions(total: int, num_shards: int) -> list[int]:
    """Return where the shards of a unit's state begin, and its end."""
    return [total * shard // num_shards for shard in range(num_shards + 1)]


def _lost_parts(unit: UnitBytes, weights: Nodes, shards: Sequence[Nodes]) -> Iterator[LostPart]:
    """Yield what of a unit no survivor holds; neighbouring shards are one part."""
    if not weights and unit.weights:
        yield LostPart(unit.name, "weights", 0, unit.weights, unit.weights)
    cuts = _cut_positions(unit.state, len(shards))
    for kept, neighbours in groupby(range(len(shards)), key=lambda shard: bool(shards[shard])):
        first, *others = neighbours
        start, stop = cuts[first], cuts[first + len(others) + 1]
        if not kept and stop > start:
            yield LostPart(unit.name, "state", start, stop, unit.state)


@dataclass(frozen=True, slots=True)
class _Need:
    """Bytes [start, stop) that a node lacks."""

    target: str
    unit: str
    kind: Kind
    start: int
    stop: int


class _Needs:
    """What nodes lack, in pools of the same holders."""

    def __init__(self) -> None:
        self._pools: dict[Nodes, list[_Need]] = {}

    def add(self, holders: Nodes, need: _Need) -> None:
        self._pools.setdefault(holders, []).append(need)

    def sent(self) -> TransferPhase:
        """Return the messages that meet all needs, from sources that are levelled."""
        received = _totals((need.target, need.stop - need.start) for needs in self._pools.values() for need in needs)
        amounts = {
            holders: sum(need.stop - need.start for need in needs)
            for holders, needs in sorted(self._pools.items(), key=lambda pool: len(pool[0]))
        }
        shares = level_sources(amounts, enough=max(received.values(), default=0))
        return TransferPhase(
            tuple(send for holders, needs in self._pools.items() for send in _hand_out(needs, holders, shares[holders]))
        )


def _need_weights(now: _Needs, unit: UnitBytes, holders: Nodes, targets: Nodes) -> None:
    if not holders:
        return
    have = set(holders)
    for target in targets:
        if target not in have:
            now.add(holders, _Need(target, unit.name, "weights", 0, unit.weights))


def _need_state(
    now: _Needs, afterwards: _Needs, unit: UnitBytes, shards: Sequence[Nodes], owners: Nodes, failures: int
) -> None:
    """Add what the owners of a unit lack of their new intervals, and what the buddies lack of their copies."""
    rings = [_ring(owners, shard, failures) for shard in range(len(owners))]
    for start, stop, was, becomes in _pieces(unit.state, len(shards), len(owners)):
        holders = shards[was]
        if not holders:
            continue
        owner, *buddies = rings[becomes]
        sources = holders
        if owner not in holders:
            now.add(holders, _Need(owner, unit.name, "state", start, stop))
            sources = (*holders, owner)
        for buddy in buddies:
            if buddy not in holders:
                afterwards.add(sources, _Need(buddy, unit.name, "state", start, stop))


def _pieces(total: int, num_before: int, num_after: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the start and stop of every piece that lies in one shard before and in one after, and these two shards."""
    cuts_before, cuts_after = _cut_positions(total, num_before), _cut_positions(total, num_after)
    start = before = after = 0
    while start < total:
        end_before, end_after = cuts_before[before + 1], cuts_after[after + 1]
        stop = min(end_before, end_after)
        if stop > start:
            yield start, stop, before, after
        before += stop == end_before
        after += stop == end_after
        start = stop


def level_sources(pools: Mapping[Nodes, int], enough: int = 0) -> dict[Nodes, list[int]]:
    """Return what each holder sends of every pool of bytes, such that the busiest source sends as little as possible.

    Each round pours every pool again, over what the other pools load on its holders. When a round changes nothing, the
    busiest source has less than one byte per source more than it must: every node that could relieve it has at most one
    byte less, and so on from node to node, and no other node has what these nodes send. The rounds end earlier if no
    source sends more than `enough`, and after MAX_ROUNDS.
    """
    loads = dict.fromkeys((node for holders in pools for node in holders), 0)
    shares = {holders: [0] * len(holders) for holders in pools}
    for _ in range(MAX_ROUNDS):
        changed = False
        for holders, amount in pools.items():
            own = shares[holders]
            poured = _pour(amount, [loads[node] - sent for node, sent in zip(holders, own, strict=True)])
            if poured != own:
                changed = True
                for node, before, sent in zip(holders, own, poured, strict=True):
                    loads[node] += sent - before
                shares[holders] = poured
        if not changed or max(loads.values()) <= enough:
            break
    return shares


def _pour(amount: int, loads: Sequence[int]) -> list[int]:
    """Return what to add to each load, `amount` in all, so that the lowest loads become level."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    filled, count = amount, 0
    while count < len(order) and (count == 0 or filled > count * loads[order[count]]):
        filled += loads[order[count]]
        count += 1
    height, rest = divmod(filled, count)
    added = [0] * len(loads)
    for place, index in enumerate(order[:count]):
        added[index] = height - loads[index] + (place < rest)
    return added


def _hand_out(needs: Iterable[_Need], holders: Nodes, shares: Sequence[int]) -> Iterator[Send]:
    """Yield the messages: holders in turn send until their share is used up."""
    sources = iter(zip(holders, shares, strict=True))
    source, left = "", 0
    for need in needs:
        start = need.start
        while start < need.stop:
            while left == 0:
                source, left = next(sources)
            stop = min(need.stop, start + left)
            yield Send(source, need.target, need.unit, need.kind, start, stop)
            left -= stop - start
            start = stop


def _totals(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the sum of the counts of every node."""
    found: dict[str, int] = {}
    for node, count in counts:
        found[node] = found.get(node, 0) + count
    return found
