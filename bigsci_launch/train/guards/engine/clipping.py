"""Checks in every step, on a few elements, that gradients reach AdamW clipped by the norm that the engine reports."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from numpy.typing import NDArray
from torch import Tensor

from bigsci_launch.train.device.gpu import Fetched
from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.engine.state import OptimizerPartition
from bigsci_launch.train.guards.ratios import is_within, ratio
from bigsci_launch.train.parallel.optimizer import loss_scale

_TOLERANCE = 2e-3
_PER_PART = 64
_TINY = 1e-12


def clip_factor(norm: float, clip: float) -> float:
    """Return the factor by which gradients of that norm are scaled; a `clip` of 0 clips nothing."""
    return min(1.0, ratio(clip, norm + 1e-6)) if clip > 0 else 1.0


@dataclass(frozen=True, slots=True)
class _Sample:
    """Elements of a partition: their places in it, and their values before clipping, times fp16's loss scale."""

    places: Tensor
    values: Fetched


class ClipWatch:
    """Keeps a few gradients of each partition of one rank on their way into AdamW."""

    def __init__(self, optimizer: Any, parts: Sequence[OptimizerPartition]) -> None:
        self._optimizer, self._parts = optimizer, parts
        self._spread: dict[tuple[int, int], Tensor] = {}
        self._clear()

    def _clear(self) -> None:
        self._before: dict[int, _Sample] = {}
        self._used: dict[int, Fetched] = {}

    @torch.no_grad()
    def see_reduced(self) -> None:
        """Keep gradients before they are clipped."""
        self._clear()
        self._scale = loss_scale(self._optimizer) or 1.0
        for number in range(len(self._parts)):
            start, piece = largest_piece(self._optimizer, number)
            places = self._places(len(piece), piece)
            self._before[number] = _Sample(places + start if start else places, Fetched(piece[places]))

    def _places(self, size: int, like: Tensor) -> Tensor:
        key = (size, like.get_device())
        if key not in self._spread:
            self._spread[key] = torch.arange(0, size, max(1, size // _PER_PART), device=like.device)
        return self._spread[key]

    @torch.no_grad()
    def see_used(self) -> None:
        """Keep the same gradients as AdamW gets them; ZeRO hands over one partition at a time."""
        for number, part in enumerate(self._parts):
            if part.master.grad is not None and number in self._before and number not in self._used:
                self._used[number] = Fetched(part.master.grad[self._before[number].places])

    def findings(self, norm: float, clip: float, rank: int) -> Iterator[Violation]:
        """Find partitions whose gradients were not scaled by the factor that follows from `norm`, the reported one."""
        if not math.isfinite(norm):
            return
        factor = clip_factor(norm, clip)
        for number, used in self._used.items():
            before, after = (each.read().double().numpy() for each in (self._before[number].values, used))
            size, apart, along = _compare(before, factor / self._scale, after)
            if math.isfinite(size) and not is_within(apart, _TOLERANCE * size + _TINY):
                real = ratio(along, size * size) * factor
                text = f"gradients reached the optimizer scaled by {real:.4g}; clipping calls for {factor:.4g}"
                yield Violation("clipping", f"group {self._parts[number].name}", (rank,), text)


@np.errstate(all="ignore")
def _compare(before: NDArray[np.float64], factor: float, after: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the size of `before` times `factor`, how far `after` is from it, and their product; any may be NaN."""
    due = before * factor
    return float(np.linalg.norm(due)), float(np.linalg.norm(after - due)), float(after @ due)


def largest_piece(optimizer: Any, number: int) -> tuple[int, Tensor]:
    """Return the longest piece of this rank's reduced gradients of a group that lies in one tensor, flat, and where it
    begins in the partition. ZeRO keeps them in pieces until its step, and joining them would copy all of them."""
    if isinstance(optimizer, BF16_Optimizer):
        return 0, optimizer.fp32_groups_gradient_flat_partition[number]
    flat: Tensor | None = optimizer._get_preflattened_grad_partition(number)
    if flat is not None:
        return 0, flat
    pieces = [each.reshape(-1) for each in optimizer.averaged_gradients[number]]
    if not pieces:
        return 0, optimizer.single_partition_of_fp32_groups[number][:0]
    longest = max(range(len(pieces)), key=lambda index: len(pieces[index]))
    return sum(len(each) for each in pieces[:longest]), pieces[longest]
