"""Checks the gradients of a step on their way from the backward pass to AdamW.

The legs of that way are checked in `guards.flow`: the loss, the layers, the reduction over dp, and clipping. Here
are the things that need several ranks, each computed in a different way from the code under check:

- Tied copies have the same gradient, bit for bit, once the stages have summed theirs.
- Only one column-parallel layer reads a layer norm's bias, so the gradient of that bias must be sum_r(W_r^T db_r)
  over the tensor-parallel ranks, where W_r is that layer's weight and db_r the gradient of its bias. A missing sum
  over ranks or an extra factor breaks this equality.
- A norm without a bias is checked by its weight w: its output y is w times something, and dy is sum_r(W_r^T dz_r) at
  each token, so w dw = sum(y dy) = sum_r(column sums of W_r dW_r), where all products are element by element.
- Clipping uses the norm of all gradients, each parameter counted once, summed in float64; and every gradient reaches
  AdamW scaled by the factor that follows from that norm. On a CPU, torch sums the squares of a tensor in 32 bits,
  almost sequentially, so the norm of DeepSpeed's bf16 optimizer is 0.4 % off for 50 M elements. That much is allowed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from bigsci_launch.train.device.digest import digest64
from bigsci_launch.train.device.gpu import finish_queued_work
from bigsci_launch.train.guards.copies import TIED, Violation
from bigsci_launch.train.guards.engine.clipping import ClipWatch, clip_factor
from bigsci_launch.train.guards.engine.data import TakenData
from bigsci_launch.train.guards.engine.hooks import before_call, before_instruction
from bigsci_launch.train.guards.engine.layers import LayerWatch
from bigsci_launch.train.guards.engine.loss import LossWatch
from bigsci_launch.train.guards.engine.reduction import ReductionWatch
from bigsci_launch.train.guards.engine.state import gradient_parts, partitions
from bigsci_launch.train.guards.ratios import is_within, ratio, root
from bigsci_launch.train.parallel.model import TransformerLayer
from bigsci_launch.train.parallel.optimizer import gradient_norm, local_gradient, loss_scale

_NORM_TOLERANCE = 1e-4
_FACTOR_TOLERANCE = 2e-3
# Sums over tokens in 16 bits and sums over outputs in 32 bits differ by a few percent; a missing rank by half.
_NORM_TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.1}


class GradientWatch:
    """Hooks into the engine's schedule and AdamW's step; the hooks do nothing unless `is_armed`."""

    def __init__(self, engine: PipelineEngine, tp_group: dist.ProcessGroup | None, rank: int) -> None:
        self._engine, self._tp_group, self._rank = engine, tp_group, rank
        self._tied = {name: each for name, each in engine.module.named_parameters() if name.startswith(TIED)}
        # Read once, here: during ZeRO's step the optimizer exposes one group at a time.
        self._parts = partitions(engine.optimizer)
        self.is_timed = False
        self._loss = LossWatch(engine, tp_group, self._armed)
        self._layers = LayerWatch(engine, self._look)
        self._reduction = ReductionWatch(engine.module, engine.optimizer, self._parts)
        self._clipping = ClipWatch(engine.optimizer, self._parts)
        self.clear()
        for instruction, look in (
            (schedule.ReduceTiedGrads, self._see_tied),
            (schedule.ReduceGrads, self._see_local),
            (schedule.OptimizerStep, self._see_reduced),
        ):
            before_instruction(engine, instruction, partial(self._look, look))
        before_instruction(engine, schedule.OptimizerStep, self._clipping.see_reduced)
        before_call(engine.optimizer.optimizer, "step", partial(self._look, self._see_used))
        before_call(engine.optimizer.optimizer, "step", self._clipping.see_used)

    def clear(self) -> None:
        for each in (self._loss, self._layers, self._reduction):
            each.clear()
        self.tied_digests = [0] * len(self._tied)
        self.violations: list[Violation] = []
        self._reduced: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self.lost_square = 0.0
        self.seconds = 0.0

    @property
    def tied_names(self) -> list[str]:
        return list(self._tied)

    def begin(self, step: int, *, is_armed: bool) -> None:
        """Begin a step, which is checked if `is_armed`."""
        self._layers.again.step, self.is_armed = step, is_armed

    @property
    def is_armed(self) -> bool:
        return self._layers.is_armed

    @is_armed.setter
    def is_armed(self, is_armed: bool) -> None:
        self._layers.is_armed = is_armed

    def _armed(self) -> bool:
        return self.is_armed

    def find_after_step(self) -> Iterator[Violation]:
        """Find a wrong gradient of the loss and gradients that were not averaged; a collective call, after the step."""
        yield from self._loss.findings(self._rank)
        yield from self._reduction.findings(self._rank)

    def find_wrong_feed(self, taken: TakenData) -> Iterator[Violation]:
        """Find that a checked step computed with other tokens or labels than the loader gave to this rank."""
        text = "the model's inputs differ from what the loader gave"
        if self._engine.is_first_stage() and self._layers.tokens != taken.tokens:
            yield Violation("data", "tokens", (self._rank,), text)
        if self._loss.is_watching and self._loss.labels not in (0, taken.labels):
            yield Violation("data", "labels", (self._rank,), text)

    def find_in_step(self, clip: float) -> Iterator[Violation]:
        """Find what can be seen in every step at next to no cost: gradients that were not clipped as reported."""
        if not getattr(self._engine.optimizer, "overflow", False):
            yield from self._clipping.findings(gradient_norm(self._engine), clip, self._rank)

    def _look(self, look: Callable[[], None]) -> None:
        if self.is_armed:
            if self.is_timed:
                finish_queued_work()
            started = time.monotonic()
            look()
            if self.is_timed:
                finish_queued_work()
            self.seconds += time.monotonic() - started

    def _see_tied(self) -> None:
        self.violations += self._layers.findings(self._rank, lambda name: name in self._tied)

    @torch.no_grad()
    def _see_local(self) -> None:
        self.violations += self._layers.findings(self._rank, lambda name: name not in self._tied)
        self._reduction.see_local()
        gradients = {name: local_gradient(parameter) for name, parameter in self._tied.items()}
        self.tied_digests = [0 if each is None else digest64(each) for each in gradients.values()]
        self.violations += find_wrong_norm_gradients(self._engine.module, self._tp_group, self._rank)

    @torch.no_grad()
    def _see_reduced(self) -> None:
        self._reduction.see_reduced()
        optimizer = self._engine.optimizer
        scale = loss_scale(optimizer) or 1.0
        for number, part in enumerate(self._parts):
            flat = gradient_parts(optimizer, number)
            squares = _squares(flat, part.slices)
            self._reduced.update({name: square / (scale * scale) for name, square in squares.items()})
        self.lost_square = lost_in_summing(optimizer)

    @torch.no_grad()
    def _see_used(self) -> None:
        for part in self._parts:
            if part.master.grad is not None and not self._used.keys() & part.slices.keys():
                self._used.update(_squares(part.master.grad, part.slices))

    def squared_norm(self, counted: Collection[str]) -> float:
        """Return the sum of squares of this rank's gradients, over the parameters in `counted`."""
        return sum(square for name, square in self._reduced.items() if name in counted)

    def find_wrong_clipping(self, norm: float, clip: float) -> Iterator[Violation]:
        """Find gradients whose factor on reaching AdamW does not follow from `norm`, the norm used for clipping."""
        if not math.isfinite(norm) or not self._used:
            return
        factor = clip_factor(norm, clip)
        for name, before in self._reduced.items():
            after, size = root(self._used.get(name, 0.0)), root(before)
            limit = _FACTOR_TOLERANCE * factor * size + 1e-12
            if math.isfinite(size) and not is_within(abs(after - factor * size), limit):
                real = ratio(after, size)
                text = f"its gradient reached the optimizer scaled by {real:.4g}; clipping calls for {factor:.4g}"
                yield Violation("clipping", name, (self._rank,), text)


def _squares(flat: Tensor, slices: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """Return the sum of squares of each slice, in float64."""
    norms = [
        torch.linalg.vector_norm(flat[start : start + size], dtype=torch.float64) for start, size in slices.values()
    ]
    return {name: norm * norm for name, norm in zip(slices, torch.stack(norms).tolist(), strict=True)} if norms else {}


def lost_in_summing(optimizer: Any) -> float:
    """Return how much 32-bit summing changes the sum of squares that this rank contributes to the clipping norm."""
    if not isinstance(optimizer, BF16_Optimizer):
        return 0.0
    gradients = [each for each in optimizer.get_grads_for_norm()[0] if each.device.type == "cpu"]
    exact = (float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in gradients)
    return sum(abs(square - float(each.norm()) ** 2) for square, each in zip(exact, gradients, strict=True))


def find_wrong_norm(independent: float, used: float, rank: int, lost: float = 0.0) -> Iterator[Violation]:
    """Yield a violation if the norm `used` for clipping differs from the one computed independently.

    `lost` is the difference that rounding in a 32-bit sum explains.
    """
    if not math.isfinite(independent) and not math.isfinite(used):
        return
    if not is_within(abs(independent - used), _NORM_TOLERANCE * independent + 2 * lost + 1e-6):
        text = f"clipping used a norm of {used:.6g}; counting every parameter once gives {independent:.6g}"
        yield Violation("gradient norm", "all gradients", (rank,), text)


def find_wrong_norm_gradients(module: nn.Module, tp_group: dist.ProcessGroup | None, rank: int) -> Iterator[Violation]:
    """Find norms whose gradient is not what the layer that reads them implies; a collective call over tp."""
    readers = []
    for prefix, layer in module.named_modules():
        if isinstance(layer, TransformerLayer):
            readers.append((f"{prefix}.attention_norm", layer.attention_norm, layer.attention.qkv))
            readers.append((f"{prefix}.mlp_norm", layer.mlp_norm, layer.mlp.up))
    if not readers:
        return
    implied = torch.stack([_implied(norm, linear) for _, norm, linear in readers])
    if tp_group is not None:
        dist.all_reduce(implied, group=tp_group)
    pairs = [(name, norm, expected, _found(norm)) for (name, norm, _), expected in zip(readers, implied, strict=True)]
    if not _is_far(pairs):
        return
    for name, norm, expected, found in pairs:
        size, apart = float(expected.norm()), float((found - expected).norm())
        if apart > _NORM_TOLERANCES[norm.weight.dtype] * size + 1e-9:
            factor = ratio(float(found @ expected), size * size)
            text = f"its gradient is {factor:.3g} times what the layer that reads it implies"
            text += f" (off by {apart / size:.0%})" if size else ", which is zero"
            yield Violation("replicated gradients", f"{name}.{'bias' if _has_bias(norm) else 'weight'}", (rank,), text)


def _has_bias(norm: nn.Module) -> bool:
    return getattr(norm, "bias", None) is not None


def _found(norm: Any) -> Tensor:
    checked = norm.bias if _has_bias(norm) else norm.weight
    found = local_gradient(checked)
    if found is None:
        return torch.zeros_like(checked, dtype=torch.float32)
    return found.float() if _has_bias(norm) else checked.detach().float() * found.float()


def _is_far(pairs: Sequence[tuple[str, Any, Tensor, Tensor]]) -> bool:
    """Return whether the gradients of this stage's norms, taken together, are far from the implied ones.

    A single gradient may be small compared with the terms that cancel in it, and 16 bits then leave little of it:
    errors of 35 % were seen in a healthy run. A defect affects all of them, so it shows just as much in their sum.
    """
    squares = [
        torch.stack([expected.square().sum(), (found - expected).square().sum()]) for _, _, expected, found in pairs
    ]
    size, apart = (math.sqrt(sum(each)) for each in zip(*torch.stack(squares).tolist(), strict=True))
    return apart > _NORM_TOLERANCES[pairs[0][1].weight.dtype] * size + 1e-9


def _implied(norm: nn.Module, linear: Any) -> Tensor:
    weight = linear.weight.detach().float()
    gradient = local_gradient(linear.bias if _has_bias(norm) else linear.weight)
    if gradient is None:
        return torch.zeros(weight.shape[1], device=weight.device)
    implied: Tensor = weight.T @ gradient.float() if _has_bias(norm) else (weight * gradient.float()).sum(dim=0)
    return implied
