"""Answers `bsl plan --survive`: the templates of a run, and what runs on each number of nodes that may be left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.survive.compose import Composition, compose
from bigsci_launch.plan.survive.replica import Replica
from bigsci_launch.plan.survive.templates import Template, sufficient_sizes, usable_sizes
from bigsci_launch.progress import Progress, no_progress

LEAST_GAIN = 0.005
"""Mean gain of throughput, over all numbers of nodes, for which one more template is made."""

MOST_TRIED = 24
"""Numbers of nodes over which that mean is taken."""

Choice = tuple[int, int]
"""A tier's number of replicas, and a size."""


@dataclass(frozen=True, slots=True)
class Tier:
    """The pipelines that fit if there are at least `replicas` of them; n0 is the fewest nodes of one.

    The fewer the replicas are, the larger is each one's shard of the optimizer, so a pipeline may need more nodes.
    """

    replicas: int
    fewest_nodes: int
    templates: Mapping[int, Template]

    def with_sizes(self, sizes: Iterable[int]) -> Tier:
        return replace(self, templates={size: self.templates[size] for size in sorted(sizes)})


@dataclass(frozen=True, slots=True)
class OnNodes:
    """What runs on a number of nodes: pipelines of a tier, and the seconds of a step, with gradients and optimizer.

    `num_whole` is the number of whole replicas of the configured layout on these nodes, and `whole_seconds` their step;
    None if no replica is left, or if the shards of the optimizer no longer fit.
    """

    num_nodes: int
    tier: Tier
    composition: Composition
    seconds: float
    num_whole: int
    whole_seconds: float | None

    @property
    def num_idle(self) -> int:
        return self.num_nodes - sum(self.composition.sizes)


@dataclass(frozen=True, eq=False)
class Survival:
    """How a run survives lost nodes.

    `sizes` are the templates that it needs, `extra_sizes` those that only make it faster. `tiers` begin with the fewest
    replicas. `by_nodes` has every number of nodes on which anything runs.
    """

    replica: Replica
    num_nodes: int
    sizes: tuple[int, ...]
    extra_sizes: tuple[Choice, ...]
    tiers: tuple[Tier, ...]
    by_nodes: Mapping[int, OnNodes]

    @property
    def failures(self) -> int:
        return self.replica.failures

    @property
    def tier(self) -> Tier:
        """The tier of f + 1 replicas, on which the guarantee rests."""
        return next(tier for tier in self.tiers if tier.replicas == self.failures + 1)

    @property
    def guaranteed_nodes(self) -> int:
        """(f + 1) n0: with fewer nodes, fewer failures are tolerated."""
        return (self.failures + 1) * self.tier.fewest_nodes

    def failures_left(self, num_pipelines: int) -> int:
        """Return how many nodes may fail at the same time without any state being lost; more copies are not kept."""
        return min(self.failures, num_pipelines - 1)

    def samples_per_second(self, num_nodes: int) -> float:
        """Return the throughput on a number of nodes, 0 where nothing runs."""
        found = self.by_nodes.get(min(num_nodes, self.num_nodes))
        return self.replica.setup.global_batch_size / found.seconds if found else 0.0

    def whole_samples_per_second(self, num_nodes: int) -> float:
        """Return the same with whole replicas of the configured layout."""
        _, seconds = whole_replicas(self.replica, min(num_nodes, self.num_nodes))
        return self.replica.setup.global_batch_size / seconds if seconds else 0.0


def plan_survival(replica: Replica, num_nodes: int, *, report_progress: Progress = no_progress) -> Survival:
    """Return how the run survives `replica.failures` lost nodes at the same time; progress is in percent.

    Raises:
        ConfigError: the nodes do not hold `failures` + 1 replicas, or the batch has too few micro batches for them.
    """
    need = replica.failures + 1
    if need > replica.num_micro_batches:
        raise ConfigError(
            f"--survive f={replica.failures}: {replica.num_micro_batches} micro batches do not give "
            f"{need} replicas one each",
            hint="a larger training.global_batch_size, or a smaller f",
        )
    fewest = _fewest(replica, need)
    if fewest is None or need * fewest > num_nodes:
        raise _too_few(replica, num_nodes, fewest)
    tiers = _tiers(replica, num_nodes)
    tier = next(tier for tier in tiers if tier.replicas == need)
    sizes = tuple(s for s in sufficient_sizes(tier.fewest_nodes, replica.failures, num_nodes) if s in tier.templates)
    kept = [(need, size) for size in sizes]
    # With fewer replicas than asked for, any template will do that runs at all.
    kept += [(fewer.replicas, size) for fewer in tiers if fewer.replicas < need for size in fewer.templates]
    planned = range(need * tier.fewest_nodes, num_nodes + 1)
    tried = planned[:: -(-len(planned) // MOST_TRIED)]
    extra = _worth_having(replica, tiers, kept, tried)
    tiers = tuple(tier for tier in _chosen(tiers, [*kept, *extra]) if tier.templates)
    by_nodes: dict[int, OnNodes] = {}
    for number in range(1, num_nodes + 1):
        found = best_on(replica, tiers, number)
        before = by_nodes.get(number - 1)
        if before and (found is None or before.seconds < found.seconds) and _keeps(before, found, need):
            found = _with_one_idle(replica, before)
        if found:
            by_nodes[number] = found
        report_progress(100 * number // num_nodes)
    return Survival(replica, num_nodes, sizes, extra, tiers, by_nodes)


def _tiers(replica: Replica, num_nodes: int) -> tuple[Tier, ...]:
    """Return a tier for f + 1 replicas, and for every number of replicas from which on fewer nodes hold one."""
    found: list[Tier] = []
    for replicas in _steps(lambda count: _fewest(replica, count), num_nodes, replica.failures + 1):
        fewest = _fewest(replica, replicas)
        most = num_nodes if replicas > replica.failures else _below_guarantee(replica, num_nodes)
        if fewest is None or replicas * fewest > most:
            continue
        for_these = replica.with_replicas(replicas)
        made = {size: for_these.template(size) for size in _candidates(replica, fewest, replicas, most)}
        found.append(Tier(replicas, fewest, {size: template for size, template in made.items() if template}))
    return tuple(found)


def _below_guarantee(replica: Replica, num_nodes: int) -> int:
    """Return the most nodes on which fewer than f + 1 replicas are all that is left."""
    fewest = _fewest(replica, replica.failures + 1)
    return min(num_nodes, (replica.failures + 1) * fewest - 1) if fewest else num_nodes


def _candidates(replica: Replica, fewest: int, replicas: int, num_nodes: int) -> range:
    """Return sizes that may be worth a template. 2 n0 nodes can also be two pipelines, with fewer stages to fill."""
    needed = sufficient_sizes(fewest, replicas - 1, num_nodes)[-1]
    usable = usable_sizes(fewest, replicas - 1, num_nodes)[-1]
    return range(fewest, min(usable, max(needed, 2 * fewest - 1), replica.most_nodes) + 1)


def _fewest(replica: Replica, replicas: int) -> int | None:
    return replica.with_replicas(replicas).fewest_nodes


def _steps(value: Callable[[int], int | None], last: int, always: int) -> list[int]:
    """Return 1, `always`, and every number at which a value that never rises has fallen."""
    found = {1, always}
    waiting = [(1, always), (always, last)]
    while waiting:
        low, high = waiting.pop()
        if high <= low or value(low) == value(high):
            continue
        if high - low == 1:
            found.add(high)
            continue
        middle = (low + high) // 2
        waiting += [(low, middle), (middle, high)]
    return sorted(found)


def _too_few(replica: Replica, num_nodes: int, fewest: int | None) -> ConfigError:
    need = replica.failures + 1
    why = f"each needs {fewest} nodes" if fewest else "no number of nodes holds one"
    possible = [count for count in range(1, need) if count * (_fewest(replica, count) or num_nodes + 1) <= num_nodes]
    return ConfigError(
        f"--survive f={replica.failures}: {num_nodes} nodes do not hold {need} replicas; {why}",
        hint=f"--survive f={possible[-1] - 1} is possible" if possible else _REMEDY if fewest is None else "more nodes",
    )


_REMEDY = "a larger parallelism.tensor_parallel_size, or a smaller training.micro_batch_size"


def _chosen(tiers: Sequence[Tier], choices: Iterable[Choice]) -> tuple[Tier, ...]:
    taken = {*choices}
    return tuple(tier.with_sizes(size for replicas, size in taken if replicas == tier.replicas) for tier in tiers)


def _worth_having(
    replica: Replica, tiers: Sequence[Tier], kept: Sequence[Choice], numbers: Sequence[int]
) -> tuple[Choice, ...]:
    """Return the sizes beyond those kept that raise the mean throughput by `LEAST_GAIN` or more each."""

    known: dict[tuple[int, tuple[int, ...], int], OnNodes | None] = {}

    def best_of(some: Sequence[Tier], number: int) -> OnNodes | None:
        for tier in some:
            key = (tier.replicas, tuple(tier.templates), number)
            if key not in known:
                known[key] = _on(replica, tier, number)
        return _best(replica, [known[tier.replicas, tuple(tier.templates), number] for tier in some])

    def rate(choices: Iterable[Choice]) -> float:
        some = _chosen(tiers, choices)
        return sum(1 / found.seconds for number in numbers if (found := best_of(some, number)))

    best = [found for number in numbers if (found := best_of(tiers, number))]
    useful = {(found.tier.replicas, size) for found in best for size in found.composition.sizes}
    chosen, now = [*kept], rate(kept)
    while left := sorted(useful - {*chosen}):
        tried = {choice: rate([*chosen, choice]) for choice in left}
        choice = max(left, key=tried.__getitem__)
        if tried[choice] < now * (1 + LEAST_GAIN):
            break
        chosen.append(choice)
        now = tried[choice]
    return tuple(sorted({*chosen} - {*kept}))


def best_on(replica: Replica, tiers: Sequence[Tier], num_nodes: int) -> OnNodes | None:
    """Return the fastest pipelines that use all nodes, with f + 1 replicas or as many as possible; None without any."""
    return _best(replica, [_on(replica, tier, num_nodes) for tier in tiers])


def _best(replica: Replica, options: Iterable[OnNodes | None]) -> OnNodes | None:
    need = replica.failures + 1
    found = [each for each in options if each]
    enough = [each for each in found if each.tier.replicas >= need]
    if enough:
        return min(enough, key=lambda each: each.seconds)
    return max(found, key=lambda each: (each.tier.replicas, -each.seconds), default=None)


def _on(replica: Replica, tier: Tier, num_nodes: int) -> OnNodes | None:
    if not tier.templates or num_nodes < tier.replicas * tier.fewest_nodes:
        return None
    found = compose(num_nodes, tier.templates, replica.num_micro_batches, tier.replicas)
    if found is None:
        return None
    return OnNodes(num_nodes, tier, found, step_seconds(replica, found), *whole_replicas(replica, num_nodes))


def _keeps(before: OnNodes, found: OnNodes | None, need: int) -> bool:
    """Return whether one idle node costs no replica that is asked for."""
    return found is None or before.tier.replicas >= min(need, found.tier.replicas)


def _with_one_idle(replica: Replica, before: OnNodes) -> OnNodes:
    count, seconds = whole_replicas(replica, before.num_nodes + 1)
    return replace(before, num_nodes=before.num_nodes + 1, num_whole=count, whole_seconds=seconds)


def step_seconds(replica: Replica, composition: Composition) -> float:
    """Return the seconds of a step, with what follows the pipelines."""
    num_stages = min(composition.sizes) * replica.stages_per_node
    return composition.seconds + replica.once_per_step(num_stages, len(composition.sizes))


def whole_replicas(replica: Replica, num_nodes: int) -> tuple[int, float | None]:
    """Return how many whole replicas of the configured layout fit, and the seconds of their step, if memory suffices.

    The batch need not divide by them, which favours them: DeepSpeed would take fewer.
    """
    setup = replica.setup
    count = num_nodes * setup.ranks_per_node // (setup.topology.tp * setup.topology.pp)
    return count, replica.whole_seconds(count)
