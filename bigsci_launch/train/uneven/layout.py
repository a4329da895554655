"""Which ranks form which pipelines, and what each of them holds. Pure: every rank finds the same layout.

The pipelines and their cuts are those of `bsl plan --survive`, with a rank in the place of a node. They have from n0 =
`parallelism.pipeline_parallel_size` to 2 n0 - 1 stages: these sizes compose every number of ranks from n0 on.

A unit is a layer of the model with all of its weights. A tied embedding is one unit, on the first and the last stage of
every pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.plan.survive.compose import compose, price_composition
from bigsci_launch.plan.survive.reconfigure import TooFewNodes, reconfigure
from bigsci_launch.plan.survive.replica import Replica
from bigsci_launch.plan.survive.templates import Template
from bigsci_launch.runs.generations.read import layout_text
from bigsci_launch.topology import Topology, UnevenTopology, compress_ranks

FAILURES = 1
"""f of a run without `survive`."""


@dataclass(frozen=True, slots=True)
class UnevenPipeline:
    """The ranks of a pipeline, stage by stage; the transformer layers of each stage; and its micro batches of a step.
    The first of these is number `first` of all pipelines."""

    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    micro_batches: int
    first: int

    def __str__(self) -> str:
        layers = ", ".join(map(str, self.counts))
        return f"ranks {compress_ranks(self.ranks)}; layers {layers}; {self.micro_batches} micro batches"


@dataclass(frozen=True)
class UnevenLayout:
    """The pipelines of all ranks. `means`: how they came from those before; `seconds`: the planned time of a step;
    `wanted`: the f that is asked for. With ZeRO-1, `copies` owners hold each shard; None: all hold everything."""

    pipelines: tuple[UnevenPipeline, ...]
    means: str
    seconds: float
    wanted: int = FAILURES
    copies: int | None = None

    @property
    def failures(self) -> int:
        """f: how many lost ranks leave a whole copy of the state."""
        return min(len(self.pipelines), self.copies or len(self.pipelines)) - 1

    @cached_property
    def places(self) -> Mapping[int, tuple[UnevenPipeline, int]]:
        """The pipeline and the stage of every rank."""
        return {rank: (each, stage) for each in self.pipelines for stage, rank in enumerate(each.ranks)}

    @cached_property
    def topology(self) -> UnevenTopology:
        """The pipelines, for the tools that look at ranks."""
        return UnevenTopology((each.ranks, each.micro_batches) for each in self.pipelines)

    def record(self) -> dict[str, Any]:
        """Return what `layouts.jsonl` says."""
        return {
            "topology": str(self.topology),
            "layers": [list(each.counts) for each in self.pipelines],
            "means": self.means,
            "failures": self.failures,
            "wanted_failures": self.wanted,
            "planned_s": self.seconds,
        }

    def lines(self) -> list[str]:
        """Return the layout as text."""
        planned = f"planned: {self.seconds:.3g} s a step, not calibrated for this machine"
        return [
            layout_text(self.record()),
            *(f"pipeline {number}: {each}" for number, each in enumerate(self.pipelines)),
            planned,
        ]


def first_layout(config: RunConfig, num_ranks: int) -> UnevenLayout:
    """Return the fastest pipelines that use all ranks, f + 1 of them or as many as possible.

    Raises:
        ConfigError: the ranks cannot all be used.
    """
    templates, num_micro_batches = _templates(config, num_ranks), micro_batches_of(config)
    for fewest in range(failures_of(config) + 1, 0, -1):
        found = compose(num_ranks, templates, num_micro_batches, fewest)
        if found is not None:
            ends = list(accumulate(found.sizes))
            groups = [tuple(range(end - size, end)) for size, end in zip(found.sizes, ends, strict=True)]
            return _layout(groups, templates, config, "composed")
    raise ConfigError(f"parallelism: {_unusable(config, num_ranks)}", hint="use another number of ranks")


def next_layout(config: RunConfig, before: UnevenLayout, new_ranks: Mapping[int, int], num_ranks: int) -> UnevenLayout:
    """Return the pipelines after a change. `new_ranks` has the new rank of every rank of `before` that is left; all
    others of the `num_ranks` have joined.

    Raises:
        ConfigError: the ranks cannot all be used.
    """
    kept = {rank: _name(rank) for rank in new_ranks.values()}
    joined = tuple(_name(rank) for rank in range(num_ranks) if rank not in kept)
    if not joined and len(new_ranks) == len(before.places):
        groups = [tuple(new_ranks[rank] for rank in each.ranks) for each in before.pipelines]
        return _layout(groups, _templates(config, num_ranks), config, "unchanged")
    # The lost have no new rank, and so a name that no other has.
    old = tuple(
        tuple(kept.get(new_ranks.get(rank, -1), f"lost{rank}") for rank in each.ranks) for each in before.pipelines
    )
    lost = {name for names in old for name in names if name.startswith("lost")}
    templates = _templates(config, num_ranks)
    try:
        changed = reconfigure(old, lost, tuple(templates), failures_of(config), joined)
    except TooFewNodes as problem:
        raise ConfigError(f"parallelism: {_unusable(config, num_ranks)}", hint=str(problem)) from None
    if changed.idle:
        raise ConfigError(f"parallelism: {_unusable(config, num_ranks)}", hint="use another number of ranks")
    groups = [tuple(int(name) for name in names) for names in changed.pipelines]
    return _layout(groups, templates, config, changed.means)


def micro_batches_of(config: RunConfig) -> int:
    """Return the micro batches of a step, over all pipelines."""
    assert config.training.micro_batch_size != "auto"
    return config.training.global_batch_size // config.training.micro_batch_size


def failures_of(config: RunConfig) -> int:
    """Return f: how many ranks may be lost at the same time, if there are enough for so many pipelines and one more."""
    return config.survive.failures if config.survive is not None else FAILURES


def _copies_of(config: RunConfig) -> int | None:
    """Return how many owners hold each shard of the optimizer: without `survive`, nothing asks for a second one."""
    if config.parallelism.zero_stage == 0:
        return None
    return config.survive.failures + 1 if config.survive is not None else 1


def _name(rank: int) -> str:
    return f"{rank:08d}"


def _unusable(config: RunConfig, num_ranks: int) -> str:
    fewest = config.parallelism.pipeline_parallel_size
    most = min(2 * fewest - 1, config.model.num_layers)
    return (
        f"{num_ranks} ranks cannot form pipelines of {fewest} to {most} stages, each with a micro batch of the "
        f"{micro_batches_of(config)} of a step"
    )


def _templates(config: RunConfig, num_ranks: int) -> dict[int, Template]:
    fewest = config.parallelism.pipeline_parallel_size
    setup = Setup.of_config(config, Topology(dp=num_ranks), 1)
    replica = Replica(setup, Calibration(), failures_of(config))
    sizes = range(fewest, min(2 * fewest - 1, config.model.num_layers, num_ranks) + 1)
    found = {size: replica.template(size) for size in sizes}
    return {size: template for size, template in found.items() if template is not None}


def _layout(
    groups: Sequence[tuple[int, ...]], templates: Mapping[int, Template], config: RunConfig, means: str
) -> UnevenLayout:
    """Return the layout of groups of ranks; each pipeline gets the micro batches that its speed asks for.

    A process group of torch has its ranks in ascending order, and a stage is a rank of its pipeline's group.
    """
    groups = sorted((tuple(sorted(ranks)) for ranks in groups), key=len)
    composed = price_composition(tuple(map(len, groups)), templates, micro_batches_of(config))
    firsts = [0, *accumulate(composed.micro_batches)]
    pipelines = tuple(
        UnevenPipeline(ranks, templates[len(ranks)].counts, count, first)
        for ranks, count, first in zip(groups, composed.micro_batches, firsts, strict=False)
    )
    copies = _copies_of(config)
    wanted = failures_of(config) if copies is None else copies - 1
    return UnevenLayout(pipelines, means, composed.seconds, wanted, copies)
