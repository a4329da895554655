"""Answers `bsl plan --survive`: the templates of a run, and what runs on each number of nodes that may be left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.survive.compose import Composition, compose
from bigsci_launch.plan.survive.replica import Replica
from bigsci_launch.plan.survive.templates import Template, sufficient_sizes, usable_sizes

LEAST_GAIN = 0.005
"""Mean gain of throughput, over all numbers of nodes, for which one more template is made."""


@dataclass(frozen=True, slots=True)
class OnNodes:
    """What runs on a number of nodes: pipelines, and the seconds of a step, with gradients and optimizer.

    `num_whole` is the number of whole replicas of the configured layout on these nodes, and `whole_seconds` their step;
    None if no replica is left, or if the shards of the optimizer no longer fit.
    """

    num_nodes: int
    composition: Composition
    seconds: float
    num_whole: int
    whole_seconds: float | None

    @property
    def num_idle(self) -> int:
        return self.num_nodes - sum(self.composition.sizes)

    @property
    def failures_left(self) -> int:
        """Nodes that may now fail at the same time and leave a whole replica."""
        return len(self.composition.sizes) - 1


@dataclass(frozen=True)
class Survival:
    """How a run survives lost nodes. `sizes` are the templates that it needs, `extra_sizes` those that only make it
    faster; `on_nodes` has every number of nodes from all of them down to (f + 1) n0."""

    replica: Replica
    num_nodes: int
    fewest_nodes: int
    sizes: tuple[int, ...]
    extra_sizes: tuple[int, ...]
    templates: Mapping[int, Template]
    on_nodes: tuple[OnNodes, ...]

    @property
    def failures(self) -> int:
        return self.replica.failures

    @property
    def guaranteed_nodes(self) -> int:
        """(f + 1) n0: with fewer nodes, fewer failures are tolerated."""
        return (self.failures + 1) * self.fewest_nodes

    @cached_property
    def by_nodes(self) -> dict[int, OnNodes]:
        return {found.num_nodes: found for found in self.on_nodes}

    def samples_per_second(self, num_nodes: int) -> float:
        """Return the throughput on a number of nodes, 0 where nothing runs."""
        found = self.on(num_nodes)
        return self.replica.setup.global_batch_size / found.seconds if found else 0.0

    def whole_samples_per_second(self, num_nodes: int) -> float:
        """Return the same with whole replicas of the configured layout."""
        _, seconds = whole_replicas(self.replica, min(num_nodes, self.num_nodes))
        return self.replica.setup.global_batch_size / seconds if seconds else 0.0

    def on(self, num_nodes: int) -> OnNodes | None:
        """Return what runs on a number of nodes; below (f + 1) n0 with fewer replicas, None if none fits."""
        if num_nodes >= self.guaranteed_nodes:
            return self.by_nodes[min(num_nodes, self.num_nodes)]
        for failures in range(self.failures - 1, -1, -1):
            fewer = self.with_failures(failures)
            if fewer is not None and num_nodes >= fewer.guaranteed_nodes:
                return fewer.by_nodes[num_nodes]
        return None

    def with_failures(self, failures: int) -> Survival | None:
        """Return the plan for fewer replicas on the nodes below (f + 1) n0; None if they do not fit.

        The fewer the replicas are, the larger is each shard of the optimizer, so a replica may need more nodes.
        """
        if failures not in self._fewer:
            replica = replace(self.replica, failures=failures)
            nodes = self.guaranteed_nodes - 1
            fewest = replica.fewest_nodes
            fits = fewest is not None and (failures + 1) * fewest <= nodes
            self._fewer[failures] = plan_survival(replica, nodes) if fits else None
        return self._fewer[failures]

    @cached_property
    def _fewer(self) -> dict[int, Survival | None]:
        return {}


def plan_survival(replica: Replica, num_nodes: int) -> Survival:
    """Return how the run survives `replica.failures` lost nodes at the same time.

    Raises:
        ConfigError: the nodes do not hold `failures` + 1 replicas.
    """
    fewest = replica.fewest_nodes
    if fewest is None or (replica.failures + 1) * fewest > num_nodes:
        raise _too_few(replica, num_nodes)
    largest = min(usable_sizes(fewest, replica.failures, num_nodes)[-1], replica.most_nodes)
    made = {size: replica.template(size) for size in range(fewest, largest + 1)}
    usable = {size: template for size, template in made.items() if template}
    sizes = tuple(size for size in sufficient_sizes(fewest, replica.failures, num_nodes) if size in usable)
    numbers = range(num_nodes, (replica.failures + 1) * fewest - 1, -1)
    extra = _worth_having(replica, usable, sizes, numbers)
    templates = {size: usable[size] for size in sorted({*sizes, *extra})}
    on_nodes = tuple(_on(replica, templates, number) for number in numbers)
    return Survival(replica, num_nodes, fewest, sizes, extra, templates, on_nodes)


def _too_few(replica: Replica, num_nodes: int) -> ConfigError:
    most = next((fewer for fewer in range(replica.failures - 1, -1, -1) if _holds(replica, fewer, num_nodes)), None)
    fewest = replica.fewest_nodes
    why = "no number of nodes holds a replica" if fewest is None else f"a replica needs {fewest} nodes"
    return ConfigError(
        f"--survive f={replica.failures}: {num_nodes} nodes do not hold {replica.failures + 1} replicas; {why}",
        hint="more nodes, or a larger tensor_parallel_size" if most is None else f"--survive f={most} is possible",
    )


def _holds(replica: Replica, failures: int, num_nodes: int) -> bool:
    fewest = replace(replica, failures=failures).fewest_nodes
    return fewest is not None and (failures + 1) * fewest <= num_nodes


def _worth_having(
    replica: Replica, usable: Mapping[int, Template], sizes: Sequence[int], numbers: Sequence[int]
) -> tuple[int, ...]:
    """Return the sizes beyond the sufficient ones that raise the mean throughput by `LEAST_GAIN` or more each."""
    best = _rates(replica, usable, numbers)
    used = {size for composition, _ in best for size in composition.sizes}
    chosen = [*sizes]
    rate = _mean(_rates(replica, {size: usable[size] for size in chosen}, numbers))
    while used - {*chosen}:
        tried = {
            size: _mean(_rates(replica, {each: usable[each] for each in sorted({*chosen, size})}, numbers))
            for size in sorted(used - {*chosen})
        }
        size = max(tried, key=lambda each: (tried[each], -each))
        if tried[size] < rate * (1 + LEAST_GAIN):
            break
        chosen.append(size)
        rate = tried[size]
    return tuple(sorted({*chosen} - {*sizes}))


def _rates(
    replica: Replica, templates: Mapping[int, Template], numbers: Sequence[int]
) -> list[tuple[Composition, float]]:
    found = (_on(replica, templates, number) for number in numbers)
    return [(each.composition, 1 / each.seconds) for each in found]


def _mean(rates: Sequence[tuple[Composition, float]]) -> float:
    return sum(rate for _, rate in rates) / len(rates)


def _on(replica: Replica, templates: Mapping[int, Template], num_nodes: int) -> OnNodes:
    """Return the fastest pipelines on a number of nodes; where no composition uses all of them, some stay idle."""
    found = None
    number = num_nodes
    while found is None:
        found = compose(number, templates, replica.num_micro_batches, replica.failures + 1)
        number -= 1
    return OnNodes(num_nodes, found, step_seconds(replica, found), *whole_replicas(replica, num_nodes))


def step_seconds(replica: Replica, composition: Composition) -> float:
    """Return the seconds of a step, with what follows the pipelines."""
    num_stages = min(composition.sizes) * replica.stages_per_node
    return composition.seconds + replica.once_per_step(num_stages, len(composition.sizes))


def whole_replicas(replica: Replica, num_nodes: int) -> tuple[int, float | None]:
    """Return how many whole replicas of the configured layout fit, and the seconds of their step, if memory suffices.

    The batch need not divide by them, which favours them: DeepSpeed would take fewer.
    """
    setup = replica.setup
    per_replica = setup.topology.tp * setup.topology.pp
    count = num_nodes * setup.ranks_per_node // per_replica
    if count == 0 or count > replica.num_micro_batches:
        return count, None
    if not replace(replica, failures=count - 1).fits(setup.layers_per_stage):
        return count, None
    template = Template(1, setup.layers_per_stage, replica.cut_model)
    seconds = template.seconds(-(-replica.num_micro_batches // count))
    return count, seconds + replica.once_per_step(setup.topology.pp, count)
