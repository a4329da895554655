"""Which ranks form which pipelines, and what each of them holds. Pure: every rank finds the same layout.

The pipelines and their cuts are those of `bsl plan --survive`, with the tensor-parallel ranks of a stage, here a block,
in the place of a node. They have from n0 = `parallelism.pipeline_parallel_size` to 2 n0 - 1 stages: these sizes compose
every number of blocks from n0 on. Block b has the ranks from b tp on. Ranks with the same tensor-parallel index form a
lane: they hold the same part of each layer, and each lane has all of the pipelines.

A unit is a layer of the model with all of its weights. A tied embedding is one unit, on the first and the last stage of
every pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.plan.survive.compose import compose, price_composition, split_batch
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
    `wanted`: the f that is asked for. With ZeRO-1, `copies` owners hold each shard; None: all hold everything. Each
    stage has `tp` ranks."""

    pipelines: tuple[UnevenPipeline, ...]
    means: str
    seconds: float
    wanted: int = FAILURES
    copies: int | None = None
    tp: int = 1

    @property
    def failures(self) -> int:
        """f: how many lost ranks, or blocks of them, leave a whole copy of the state."""
        return min(len(self.pipelines), self.copies or len(self.pipelines)) - 1

    @cached_property
    def places(self) -> Mapping[int, tuple[UnevenPipeline, int]]:
        """The pipeline and the stage of every rank."""
        return {rank: (each, at // self.tp) for each in self.pipelines for at, rank in enumerate(each.ranks)}

    @cached_property
    def lanes(self) -> tuple[UnevenLayout, ...]:
        """The pipelines of the ranks with each tensor-parallel index."""
        return tuple(
            replace(
                self, pipelines=tuple(replace(each, ranks=each.ranks[lane :: self.tp]) for each in self.pipelines), tp=1
            )
            for lane in range(self.tp)
        )

    @cached_property
    def topology(self) -> UnevenTopology:
        """The pipelines, for the tools that look at ranks."""
        return UnevenTopology(((each.ranks, each.micro_batches) for each in self.pipelines), self.tp)

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
        basis = "by what was measured" if self.means == "balanced" else "not calibrated for this machine"
        planned = f"planned: {self.seconds:.3g} s a step, {basis}"
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
    num_blocks = num_ranks // config.parallelism.tensor_parallel_size
    templates, num_micro_batches = _templates(config, num_blocks), micro_batches_of(config)
    for fewest in range(failures_of(config) + 1, 0, -1):
        found = compose(num_blocks, templates, num_micro_batches, fewest)
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
    tp = config.parallelism.tensor_parallel_size
    num_blocks, new_blocks = num_ranks // tp, _new_blocks(new_ranks, tp)
    kept = {block: _name(block) for block in new_blocks.values()}
    joined = tuple(_name(block) for block in range(num_blocks) if block not in kept)
    templates = _templates(config, num_blocks)
    blocks = [tuple(rank // tp for rank in each.ranks[::tp]) for each in before.pipelines]
    if not joined and len(new_blocks) == sum(map(len, blocks)):
        groups = [tuple(new_blocks[block] for block in each) for each in blocks]
        return _layout(groups, templates, config, "unchanged")
    # The lost have no new block, and so a name that no other has.
    old = tuple(tuple(kept.get(new_blocks.get(block, -1), f"lost{block}") for block in each) for each in blocks)
    lost = {name for names in old for name in names if name.startswith("lost")}
    try:
        changed = reconfigure(old, lost, tuple(templates), failures_of(config), joined)
    except TooFewNodes as problem:
        raise ConfigError(f"parallelism: {_unusable(config, num_ranks)}", hint=str(problem)) from None
    if changed.idle:
        raise ConfigError(f"parallelism: {_unusable(config, num_ranks)}", hint="use another number of ranks")
    groups = [tuple(int(name) for name in names) for names in changed.pipelines]
    return _layout(groups, templates, config, changed.means)


def balanced_layout(config: RunConfig, before: UnevenLayout, seconds: Sequence[float]) -> UnevenLayout:
    """Return the same pipelines with the micro batches that their measured speed asks for. `seconds` is what the passes
    of each pipeline took; the planned seconds of the result are those of the planner, as much slower as measured."""
    templates = _templates(config, len(before.places) // before.tp)
    measured = []
    for each, took in zip(before.pipelines, seconds, strict=True):
        template = templates[len(each.counts)]
        measured.append(replace(template, factor=took / template.seconds(each.micro_batches)))
    counts = split_batch(measured, micro_batches_of(config))
    pipelines = tuple(
        replace(each, micro_batches=count, first=first)
        for each, count, first in zip(before.pipelines, counts, [0, *accumulate(counts)], strict=False)
    )
    planned = max(template.seconds(count) for template, count in zip(measured, counts, strict=True))
    return replace(before, pipelines=pipelines, means="balanced", seconds=planned)


def _new_blocks(new_ranks: Mapping[int, int], tp: int) -> dict[int, int]:
    """Return the new block of every block that has a rank left: the first that has one of its ranks."""
    found: dict[int, int] = {}
    for rank, new in sorted(new_ranks.items(), key=lambda each: each[1]):
        if rank // tp not in found and new // tp not in found.values():
            found[rank // tp] = new // tp
    return found


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


def _name(block: int) -> str:
    return f"{block:08d}"


def _unusable(config: RunConfig, num_ranks: int) -> str:
    fewest = config.parallelism.pipeline_parallel_size
    most = min(2 * fewest - 1, config.model.num_layers)
    return (
        f"{num_ranks} ranks cannot form pipelines of {fewest} to {most} stages, each with a micro batch of the "
        f"{micro_batches_of(config)} of a step"
    )


def _templates(config: RunConfig, num_blocks: int) -> dict[int, Template]:
    fewest, tp = config.parallelism.pipeline_parallel_size, config.parallelism.tensor_parallel_size
    setup = Setup.of_config(config, Topology(tp=tp, dp=num_blocks), tp)
    replica = Replica(setup, Calibration(), failures_of(config))
    sizes = range(fewest, min(2 * fewest - 1, config.model.num_layers, num_blocks) + 1)
    found = {size: replica.template(size) for size in sizes}
    return {size: template for size, template in found.items() if template is not None}


def _layout(
    groups: Sequence[tuple[int, ...]], templates: Mapping[int, Template], config: RunConfig, means: str
) -> UnevenLayout:
    """Return the layout of groups of blocks; each pipeline gets the micro batches that its speed asks for.

    A process group of torch has its ranks in ascending order, and a stage is a rank of its pipeline's group.
    """
    tp = config.parallelism.tensor_parallel_size
    groups = sorted((tuple(sorted(blocks)) for blocks in groups), key=len)
    composed = price_composition(tuple(map(len, groups)), templates, micro_batches_of(config))
    firsts = [0, *accumulate(composed.micro_batches)]
    pipelines = tuple(
        UnevenPipeline(_ranks_of(blocks, tp), templates[len(blocks)].counts, count, first)
        for blocks, count, first in zip(groups, composed.micro_batches, firsts, strict=False)
    )
    copies = _copies_of(config)
    wanted = failures_of(config) if copies is None else copies - 1
    return UnevenLayout(pipelines, means, composed.seconds, wanted, copies, tp)


def _ranks_of(blocks: Iterable[int], tp: int) -> tuple[int, ...]:
    return tuple(block * tp + lane for block in blocks for lane in range(tp))
