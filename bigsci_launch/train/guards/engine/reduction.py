"""Checks that gradients were averaged over the data-parallel ranks.

Before the reduction each rank keeps some elements of its gradients, and the ranks average them on their own. After it,
each rank compares them with what has arrived in its partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigsci_launch.train.device.gpu import send
from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.engine.samples import spread
from bigsci_launch.train.guards.engine.state import OptimizerPartition, gradient_parts
from bigsci_launch.train.parallel.optimizer import local_gradient

_PER_TENSOR = 32
# Of the mean size of the parts: sums in another order, and DeepSpeed sends 16 bits unless the weights have 32.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True)
class _ReducedSample:
    """Reduced elements of a gradient, float64: those of its places that are listed in `inside`."""

    name: str
    inside: Tensor
    found: Tensor


class ReductionWatch:
    """Compares the gradients of one rank before and after the reduction over dp."""

    def __init__(self, module: nn.Module, optimizer: Any, parts: Sequence[OptimizerPartition]) -> None:
        self._optimizer, self._parts = optimizer, parts
        self._group = optimizer.real_dp_process_group[0]
        self._weights = dict(module.named_parameters())
        self._places = {name: spread(each.numel(), _PER_TENSOR) for name, each in self._weights.items()}
        self._at = {name: _indices(places, self._weights[name]) for name, places in self._places.items()}
        self._inside: dict[tuple[int, str], tuple[Tensor, Tensor] | None] = {}
        self.clear()

    def clear(self) -> None:
        self._local: Tensor | None = None
        self._reduced: list[_ReducedSample] = []

    @torch.no_grad()
    def see_local(self) -> None:
        """Keep samples of the gradients before the reduction."""
        if dist.get_world_size(group=self._group) > 1:
            self._local = torch.cat([_elements(self._weights[name], at) for name, at in self._at.items()])

    @torch.no_grad()
    def see_reduced(self) -> None:
        """Keep the same elements after the reduction, as far as they lie in this rank's partition."""
        if self._local is not None:
            for number, part in enumerate(self._parts):
                flat = gradient_parts(self._optimizer, number)
                for name in part.slices:
                    if (places := self._places_inside(number, name)) is not None:
                        inside, at = places
                        self._reduced.append(_ReducedSample(name, inside, flat[at].double()))

    def _places_inside(self, number: int, name: str) -> tuple[Tensor, Tensor] | None:
        """Return which places of a weight lie in this rank's partition, and where in it; None if there are none."""
        if (number, name) not in self._inside:
            weight: Any = self._weights[name]
            start, size = self._parts[number].slices[name]
            first = weight._hp_mapping.lp_fragment_address.start
            kept = {index: place for index, place in enumerate(self._places[name]) if first <= place < first + size}
            at = [start + place - first for place in kept.values()]
            self._inside[number, name] = (_indices([*kept], weight), _indices(at, weight)) if kept else None
        return self._inside[number, name]

    @torch.no_grad()
    def findings(self, rank: int) -> Iterator[Violation]:
        """Find gradients in this rank's partition that are not the mean over dp; a collective call of the dp ranks.

        It is made after the step: a collective within a checked step would hide from `bsl spy` which rank left the
        schedule.
        """
        if self._local is None:
            return
        both = torch.stack([self._local, self._local.abs()]) / dist.get_world_size(group=self._group)
        dist.all_reduce(both, group=self._group)
        lengths = [len(places) for places in self._places.values()]
        means = dict(zip(self._places, torch.split(both[0], lengths), strict=True))
        sizes = dict(zip(self._places, torch.split(both[1], lengths), strict=True))
        counts = [self._count_wrong(each, means[each.name], sizes[each.name]) for each in self._reduced]
        for sample, count in zip(self._reduced, torch.stack(counts).tolist() if counts else (), strict=True):
            if count:
                text = f"{count} of {len(sample.found)} compared elements are not the mean over the data-parallel ranks"
                # The rank whose partition holds the sum; any rank may have sent a wrong part of it.
                yield Violation("gradient reduction", sample.name, (rank,), text, is_decided=False)

    def _count_wrong(self, sample: _ReducedSample, means: Tensor, sizes: Tensor) -> Tensor:
        mean = means[sample.inside]
        limit = _TOLERANCE[self._weights[sample.name].dtype] * sizes[sample.inside] + 1e-30
        # What is not a number is within no limit.
        is_close = (sample.found - mean).abs() <= limit
        return (~is_close & torch.isfinite(mean)).sum()


def _indices(places: Sequence[int], weight: nn.Parameter) -> Tensor:
    return send(torch.tensor(places, dtype=torch.int64), weight.device)


def _elements(parameter: nn.Parameter, at: Tensor) -> Tensor:
    gradient = local_gradient(parameter)
    if gradient is None:
        return torch.zeros(len(at), dtype=torch.float64, device=parameter.device)
    return gradient.reshape(-1)[at].double()
