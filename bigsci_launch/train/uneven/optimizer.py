"""AdamW over the fp32 masters of a stage, as far as this rank holds them (see `shards`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigsci_launch.config.schema.run import OptimizerSection
from bigsci_launch.recover.holding import Shard
from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.parallel.optimizer import choose_kernel, group_by_shape, optimizer_over
from bigsci_launch.train.uneven.shards import OwnerShards
from bigsci_launch.train.uneven.stage import UnevenStage, Unit

MOMENTS = ("exp_avg", "exp_avg_sq")
ROLES = ("master", *MOMENTS)


@dataclass(frozen=True, slots=True)
class ReducedStep:
    """What the sum over all ranks has found of a step: who knows it knows that all ranks have its gradients."""

    step: int
    loss: float = math.nan
    norm: float = 0.0
    learning_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitState:
    """What must be kept of a parameter, or of a shard of one: its fp32 master and AdamW's moments."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.master, self.exp_avg, self.exp_avg_sq


class MasterAdamW:
    """The optimizer of one stage, with all that must outlive its engine. In fp32, masters are in the weights' memory.

    `taken` is the last step that it has taken or skipped; `summed` the last one whose gradients are summed over all
    owners, and are kept until the next one begins.
    """

    def __init__(self, stage: UnevenStage, config: OptimizerSection, shards: OwnerShards) -> None:
        self._config = config
        self.weights = dict(stage.named_parameters())
        self.units = dict(stage.by_unit())
        self.masters = {
            shard: nn.Parameter(_piece(weight, shard).float())
            for name, weight in self.weights.items()
            for shard in shards.held(name, weight.numel())
        }
        named = [(shard.unit, master) for shard, master in self.masters.items()]
        self.optimizer = optimizer_over(named, config, lambda name, _: group_by_shape(name, self.weights[name]))
        for master in self.masters.values():
            moments = {name: torch.zeros_like(master) for name in MOMENTS}
            self.optimizer.state[master] = {"step": torch.tensor(0.0), **moments}
        choose_kernel(self.optimizer, fused=computes_on_gpu())
        for weight in self.weights.values():
            weight._hp_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
            if weight.dtype != torch.float32:
                weight.register_post_accumulate_grad_hook(_accumulate_in_fp32)  # type: ignore[no-untyped-call]
        self.taken, self.summed = ReducedStep(0), 0
        self.num_skipped = 0
        self.overflow = False

    @property
    def lengths(self) -> dict[str, int]:
        """The number of elements of each parameter."""
        return {name: weight.numel() for name, weight in self.weights.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def clear_gradients(self) -> None:
        for weight in self.weights.values():
            weight._hp_grad.zero_()  # type: ignore[attr-defined]
            # In fp32, backward passes accumulate into the same memory.
            weight.grad = weight._hp_grad if weight.dtype == torch.float32 else None  # type: ignore[attr-defined]

    def gradients(self) -> dict[Unit, list[Tensor]]:
        """Return what the backward passes have accumulated, by unit, as fp32."""
        return {unit: [self.weights[name]._hp_grad for name in names] for unit, names in self.units.items()}  # type: ignore[attr-defined]

    def gradients_of(self, units: Sequence[Unit], *, only_split: bool) -> list[Tensor]:
        """Return the gradients of these units, all or those alone that tensor-parallel ranks split."""
        weights = [self.weights[name] for unit in units for name in self.units[unit]]
        return [each._hp_grad for each in weights if not only_split or is_split(each)]  # type: ignore[attr-defined]

    def take(self, reduced: ReducedStep) -> None:
        """Take the step whose gradients are summed, or skip it where they are not finite."""
        self.taken = reduced
        if math.isfinite(reduced.norm):
            self._step(reduced.norm)
        else:
            self.num_skipped += 1

    @torch.no_grad()
    def _step(self, norm: float) -> None:
        """Take a step with gradients whose global norm is `norm`, clipped as DeepSpeed does."""
        limit = self._config.clip_grad
        factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        for shard, master in self.masters.items():
            gradient = _piece(self.weights[shard.unit]._hp_grad, shard)  # type: ignore[attr-defined]
            master.grad = gradient.mul_(factor) if factor < 1.0 else gradient
        self.optimizer.step()
        self._round_masters()
        for master in self.masters.values():
            master.grad = None

    def _round_masters(self) -> None:
        for shard, master in self.masters.items():
            if (weight := self.weights[shard.unit]).dtype != torch.float32:
                _piece(weight, shard).copy_(master)

    @torch.no_grad()
    def share_weights(self, shards: OwnerShards) -> None:
        """Get what other owners have computed of the weights; a collective call of the owners of each unit."""
        like = next(iter(self.weights.values()))

        def part(shard: Shard) -> Tensor:
            return _piece(self.weights[shard.unit], shard)

        for name, flat in shards.whole(self.lengths, part, like.detach()).items():
            self.weights[name].view(-1).copy_(flat)

    def whole_states(self, shards: OwnerShards) -> dict[str, UnitState]:
        """Return the whole state of each parameter, flat; a collective call of the owners of each unit."""
        by_role = [self._whole(role, shards) for role in ROLES]
        return {name: UnitState(*(flats[name] for flats in by_role)) for name in self.weights}

    def _whole(self, role: str, shards: OwnerShards) -> dict[str, Tensor]:
        def part(shard: Shard) -> Tensor:
            tensor: Tensor = getattr(self.state_of(shard), role)
            return tensor

        lengths = self.lengths
        found = shards.whole(lengths, part, next(iter(self.masters.values())).detach())
        return {name: found[name] if name in found else part(Shard(name, 0, lengths[name])) for name in lengths}

    def state_of(self, shard: Shard) -> UnitState:
        """Return the state of a shard that this rank holds, flat; its tensors are those of the optimizer."""
        state = self.optimizer.state[self.masters[shard]]
        return UnitState(self.masters[shard].detach(), *(state[moment] for moment in MOMENTS))

    @torch.no_grad()
    def load(self, states: Mapping[str, UnitState], taken: ReducedStep, num_skipped: int, num_steps: int) -> None:
        """Continue with these states, after `num_steps` steps that were not skipped. Of the moments, only what this
        rank holds has to be there."""
        self.taken, self.summed, self.num_skipped = taken, taken.step, num_skipped
        for name, weight in self.weights.items():
            weight.copy_(states[name].master.view_as(weight))
        for shard in self.masters:
            for own, tensor in zip(self.state_of(shard).tensors, states[shard.unit].tensors, strict=True):
                own.copy_(_piece(tensor, shard))
        for state in self.optimizer.state.values():
            state["step"].fill_(float(num_steps))
        self._round_masters()

    @property
    def num_steps(self) -> int:
        """The steps that were not skipped."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    def names_by_group(self) -> list[list[str]]:
        """Return the names of the parameters of each group, in the order of the stage."""
        groups = [group["name"] for group in self.param_groups]
        of = {name: group_by_shape(name, weight) for name, weight in self.weights.items()}
        return [[name for name in self.weights if of[name] == group] for group in groups]


def is_split(weight: Tensor) -> bool:
    """Return whether each tensor-parallel rank has another part of a weight."""
    return getattr(weight, "model_parallel", False)


def _piece(tensor: Tensor, shard: Shard) -> Tensor:
    """Return the elements of a shard, in the memory of `tensor`."""
    return tensor.detach().view(-1)[shard.start : shard.stop]


def _accumulate_in_fp32(weight: Tensor) -> None:
    weight._hp_grad.add_(weight.grad)  # type: ignore[attr-defined]
    weight.grad = None


def square_norm(gradients: Sequence[Tensor]) -> float:
    """Return the sum of the squares of all elements."""
    return sum(float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in gradients)
