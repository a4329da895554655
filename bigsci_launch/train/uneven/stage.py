"""The layers of one stage, with the names and weights that they have in every other layout of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.plan.shape.partition import Layer, cut_at_counts
from bigsci_launch.plan.survive.uneven import UnevenLayout
from bigsci_launch.train.guards.copies import TIED
from bigsci_launch.train.parallel.model import TransformerLayer
from bigsci_launch.train.rank.rng import derive_seed

Unit = str
"""The number of a layer, or the name of a tied module."""


def unit_of(name: str) -> Unit:
    """Return the unit of a parameter."""
    return ".".join(name.split(".")[:2]) if name.startswith(TIED) else name.partition(".")[0]


def bounds_of(specs: Sequence[LayerSpec], counts: Sequence[int]) -> tuple[int, ...]:
    """Return the first layer of every stage of a pipeline, and the number of layers."""
    names = [spec.typename.__name__ for spec in specs]
    layers = [Layer(name, is_transformer=name == TransformerLayer.__name__) for name in names]
    return cut_at_counts(layers, counts, len(counts))


def owners_of(specs: Sequence[LayerSpec], layout: UnevenLayout) -> dict[Unit, tuple[int, ...]]:
    """Return the ranks that hold each unit, in the order of the model's layers. The first rank is the unit's first
    owner, and counts it where it must count once."""
    found: dict[Unit, list[int]] = {}
    for number, spec in enumerate(specs):
        owners = found.setdefault(_unit_of_spec(number, spec), [])
        for pipeline in layout.pipelines:
            for rank, (first, stop) in zip(pipeline.ranks, pairwise(bounds_of(specs, pipeline.counts)), strict=True):
                if first <= number < stop and rank not in owners:
                    owners.append(rank)
    return {unit: tuple(sorted(ranks)) for unit, ranks in found.items()}


def _unit_of_spec(number: int, spec: LayerSpec) -> Unit:
    return f"{TIED}{spec.key}" if isinstance(spec, TiedLayerSpec) else str(number)


class UnevenStage(nn.Module):
    """Layers `first` to before `stop` of the model. Its parameters have DeepSpeed's names.

    Random numbers belong to a layer and a micro batch of a step, whichever rank computes them.
    """

    def __init__(self, specs: Sequence[LayerSpec], first: int, stop: int, config: RunConfig) -> None:
        super().__init__()
        self._seed, self._recomputes = config.run.seed, config.training.activation_checkpointing is True
        self._draws = config.model.dropout > 0
        self._step, self._micro_batches = 0, iter(range(0))
        self.numbers = range(first, stop)
        tied = [spec for spec in specs[first:stop] if isinstance(spec, TiedLayerSpec)]
        if tied:
            self.tied_modules = nn.ModuleDict({spec.key: spec.build() for spec in tied[:1]})
        self._calls = [self._call(number, specs[number]) for number in self.numbers]

    def _call(self, number: int, spec: LayerSpec) -> Callable[[Tensor], Any]:
        if isinstance(spec, TiedLayerSpec):
            tied: nn.Module = self.tied_modules[spec.key]
            return tied if spec.forward_fn is None else partial(spec.forward_fn, tied)
        layer: nn.Module = spec.build()
        self.add_module(str(number), layer)
        if isinstance(layer, TransformerLayer) and self._recomputes:
            return partial(checkpoint, layer, use_reentrant=False)
        return layer

    def begin_step(self, step: int, micro_batches: range) -> None:
        """Compute these micro batches of `step` next, in this order; their numbers are those of all pipelines."""
        self._step, self._micro_batches = step, iter(micro_batches)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, length) or the stream (batch, length, hidden) -> the stream, or logits."""
        micro_batch = next(self._micro_batches, None)
        for number, call in zip(self.numbers, self._calls, strict=True):
            if self._draws:
                torch.manual_seed(derive_seed(self._seed, f"step{self._step}/micro{micro_batch}/layer{number}"))
            x = call(x)
        return x

    def by_unit(self) -> Iterator[tuple[Unit, list[str]]]:
        """Yield the names of the parameters of each unit."""
        found: dict[Unit, list[str]] = {}
        for name, _ in self.named_parameters():
            found.setdefault(unit_of(name), []).append(name)
        yield from found.items()
