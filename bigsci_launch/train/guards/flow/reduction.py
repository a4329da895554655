"""Checks that gradients were averaged over the data-parallel ranks.

Before the reduction each rank keeps some elements of its gradients, and the ranks average them on their own. After it,
each rank compares them with what has arrived in its partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.flow.samples import spread
from bigsci_launch.train.guards.state import OptimizerPartition, gradient_parts, local_gradient

_PER_TENSOR = 32
# Of the mean size of the parts: sums in another order, and DeepSpeed sends 16 bits unless the weights have 32.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class ReductionWatch:
    """Compares the gradients of one rank before and after the reduction over dp."""

    def __init__(self, module: nn.Module, optimizer: Any, parts: Sequence[OptimizerPartition]) -> None:
        self._optimizer, self._parts = optimizer, parts
        self._group = optimizer.real_dp_process_group[0]
        self._weights = dict(module.named_parameters())
        self._places = {name: spread(each.numel(), _PER_TENSOR) for name, each in self._weights.items()}
        self.clear()

    def clear(self) -> None:
        """Forget the last step."""
        self._expected: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def see_local(self) -> None:
        """Average samples of the gradients over dp; a collective call of its ranks."""
        size = dist.get_world_size(group=self._group)
        if size == 1:
            return
        mine = torch.cat([_at(self._weights[name], places) for name, places in self._places.items()])
        both = torch.stack([mine, mine.abs()]) / size
        dist.all_reduce(both, group=self._group)
        lengths = [len(places) for places in self._places.values()]
        means, sizes = torch.split(both[0], lengths), torch.split(both[1], lengths)
        self._expected = {name: (mean, size) for name, mean, size in zip(self._places, means, sizes, strict=True)}

    @torch.no_grad()
    def findings(self, rank: int) -> Iterator[Violation]:
        """Find gradients in this rank's partition that are not the mean over dp."""
        if not self._expected:
            return
        for number, part in enumerate(self._parts):
            flat = gradient_parts(self._optimizer, number)
            yield from self._compare(flat, part.slices, rank)

    def _compare(self, flat: Tensor, slices: Mapping[str, tuple[int, int]], rank: int) -> Iterator[Violation]:
        for name, (start, size) in slices.items():
            weight: Any = self._weights[name]
            first = weight._hp_mapping.lp_fragment_address.start
            inside = [index for index, place in enumerate(self._places[name]) if first <= place < first + size]
            if not inside:
                continue
            found = torch.stack([flat[start + self._places[name][index] - first] for index in inside]).double()
            mean, scale = (each[inside] for each in self._expected[name])
            apart = (found - mean).abs() > _TOLERANCE[weight.dtype] * scale + 1e-30
            count = int((apart & torch.isfinite(mean)).sum())
            if count:
                text = f"{count} of {len(inside)} compared elements are not the mean over the data-parallel ranks"
                yield Violation("gradient reduction", name, (rank,), text)


def _at(parameter: nn.Parameter, places: Sequence[int]) -> Tensor:
    gradient = local_gradient(parameter)
    if gradient is None:
        return torch.zeros(len(places), dtype=torch.float64, device=parameter.device)
    return gradient.reshape(-1)[torch.tensor(places, device=gradient.device)].double()
