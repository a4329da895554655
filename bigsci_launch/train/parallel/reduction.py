"""Sums gradients over the data-parallel ranks while the backward pass of the last micro-batch still runs.

DeepSpeed reduces all gradients of a step after that pass. Here they are cut into buckets, in the order in which the
first step has made them on the first of the ranks. A bucket is sent as soon as its gradients are complete and all
buckets before it are sent, so all ranks send the same in the same order, even if one lacks a gradient. What is sent is
a copy in 16 bits, as DeepSpeed sends it. The sums of this rank stay as they are until the engine reduces, so guards
find there what they look for. What other ranks have to sum first is left to DeepSpeed: tied weights, which stages sum,
and with sequence parallelism what tensor-parallel ranks copy.

With two ranks the result has the same bits. With more, the order of an element's sum depends on its place in a bucket,
so it differs by the rounding of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

BUCKET_ELEMENTS = 1 << 25
"""64 MiB in 16 bits: enough for the bandwidth between nodes, and little compared with all gradients."""

GradientPlace = tuple[int, int]
"""An optimizer group, and the number of a parameter in it."""


class GradientBucket:
    """Gradients that are summed together."""

    def __init__(self, gradients: list[Tensor], dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self._gradients, self._dtype, self._group = gradients, dtype, group
        self._sums: Tensor | None = None
        self._work: dist.Work | None = None
        self.num_missing = len(gradients)

    @property
    def is_sent(self) -> bool:
        return self._work is not None

    @torch.no_grad()
    def send(self) -> None:
        """Begin to sum these gradients over the ranks."""
        self._sums = torch.cat([each.to(self._dtype) for each in self._gradients])
        self._work = dist.all_reduce(self._sums, group=self._group, async_op=True)

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the sums, put their means where the gradients are, and be ready for the next step."""
        assert self._work is not None and self._sums is not None
        self._work.wait()
        self._sums.mul_(1.0 / dist.get_world_size(group=self._group))
        sizes = [each.numel() for each in self._gradients]
        torch._foreach_copy_(self._gradients, torch.split(self._sums, sizes))
        self._work = self._sums = None
        self.num_missing = len(self._gradients)


class OverlappedReduction:
    """Stands between an engine and its backward passes and reduction. The first step is DeepSpeed's, and is watched."""

    def __init__(self, engine: PipelineEngine, later: Sequence[nn.Parameter]) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._group: dist.ProcessGroup = engine.mpu.get_data_parallel_group()
        tied = [weight for weight, _ in engine.module.get_tied_weights_and_groups()]
        left = {id(weight) for weight in (*tied, *later)}
        found = {
            (number, index): id(weight)
            for number, group in enumerate(engine.optimizer.bf16_groups)
            for index, weight in enumerate(group)
        }
        self._left = [place for place, weight in found.items() if weight in left]
        self._sent = [place for place, weight in found.items() if weight not in left]
        self._arrived: list[GradientPlace] = []
        self._buckets: list[GradientBucket] = []
        self._bucket_of: dict[GradientPlace, GradientBucket] = {}
        self._num_passes = 0
        self._accumulate: Callable[..., None] = engine.optimizer.accumulate_hp_grads_and_remove_lp
        engine.optimizer.accumulate_hp_grads_and_remove_lp = self._add
        self._run = dict(engine._INSTRUCTION_MAP)
        own = {schedule.BackwardPass: self._in_backward, schedule.ReduceGrads: self._in_reduction}
        engine._INSTRUCTION_MAP = {**self._run, **own}

    def _in_backward(self, engine: PipelineEngine, *arguments: Any, **named: Any) -> None:
        self._num_passes += 1
        self._run[schedule.BackwardPass](engine, *arguments, **named)

    def _add(self, parameter: nn.Parameter, group: int, number: int) -> None:
        """Add a gradient to the sum of the step's micro-batches, as DeepSpeed does, and see what can be sent."""
        self._accumulate(parameter, group, number)
        place = group, number
        if self._num_passes < self._engine.micro_batches or place in self._left:
            return
        if not self._buckets:
            self._arrived.append(place)
            return
        bucket = self._bucket_of[place]
        if bucket.is_sent:
            raise RuntimeError(f"parameter {number} of optimizer group {group} got a gradient after it was sent")
        bucket.num_missing -= 1
        self._send()

    def _send(self, *, is_last: bool = False) -> None:
        for bucket in self._buckets:
            if not bucket.is_sent:
                if bucket.num_missing and not is_last:
                    return
                bucket.send()

    def _in_reduction(self, engine: PipelineEngine) -> None:
        self._num_passes = 0
        if not self._buckets:
            self._run[schedule.ReduceGrads](engine)
            self._cut(self._agreed_order())
            return
        self._send(is_last=True)
        for bucket in self._buckets:
            bucket.receive()
        if self._left:
            engine.buffered_allreduce_fallback(grads=self._gradients(self._left))

    def _gradients(self, places: Sequence[GradientPlace]) -> list[Tensor]:
        return [self._optimizer.fp32_groups_gradients[group][number] for group, number in places]

    def _agreed_order(self) -> list[GradientPlace]:
        """Return the order in which gradients arrived on the first rank of the group; a collective call."""
        order: list[Any] = [self._arrived]
        dist.broadcast_object_list(order, src=dist.get_global_rank(self._group, 0), group=self._group)
        return [*dict.fromkeys([*order[0], *self._sent])]

    def _cut(self, order: Sequence[GradientPlace]) -> None:
        parts: list[list[GradientPlace]] = [[]]
        for place in order:
            if sum(each.numel() for each in self._gradients(parts[-1])) >= BUCKET_ELEMENTS:
                parts.append([])
            parts[-1].append(place)
        for part in parts:
            bucket = GradientBucket(self._gradients(part), self._engine.communication_data_type, self._group)
            self._buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(part, bucket))


def overlap_reduction(engine: PipelineEngine, later: Sequence[nn.Parameter] = ()) -> None:
    """Let the reduction of an engine overlap with its backward pass, if it computes in 16 bits and has replicas.

    The gradients of `later` are complete only when the engine reduces.
    """
    if isinstance(engine.optimizer, BF16_Optimizer) and engine.is_data_parallel:
        OverlappedReduction(engine, later)
