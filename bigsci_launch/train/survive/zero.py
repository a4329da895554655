"""A DeepSpeed engine with ZeRO among the objects of a loop.

A rank has parts of the fp32 masters, and of what the optimizer keeps of them, all flat: with stages 1 and 2 a part of
each optimizer group, with stage 3 one of each parameter. They are parts of units whose length does not depend on the
number of ranks. Weights are not in the state, since they are the rounded masters; buffers and weights that are not
trained are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from bigsci_launch.errors import BslError
from bigsci_launch.train.guards.engine.state import partitions
from bigsci_launch.train.parallel.optimizer import loss_scale
from bigsci_launch.train.survive.flat import FlatPart, PartedObject
from bigsci_launch.train.survive.objects import NOT_IN_PLACE

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_KNOWN = (DeepSpeedZeroOptimizer, BF16_Optimizer, DeepSpeedZeroOptimizer_Stage3)


class ZeroEngine(PartedObject):
    """The engine as an object that `Survivor.keep` knows. `name` is for errors.

    Raises:
        BslError: its state is cut in a way that is not known here.
    """

    def __init__(self, name: str, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        if (why := _why_unknown(engine)) is not None:
            raise BslError(f"keep: {name}: {why}. {NOT_IN_PLACE}", hint="Survivor keeps ZeRO stages 1, 2 and 3")
        self._masters = _masters(engine.optimizer)
        self._parts = list(_parts(engine.optimizer, self._masters))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of masters, which DeepSpeed calls."""
        found: torch.optim.Optimizer = self.engine.optimizer.optimizer
        return found

    @property
    def local(self) -> list[str]:
        return [f"untrained.{key}" for key, _ in self.engine.module.named_buffers()]

    def places(self, form: Any) -> list[tuple[FlatPart, Any]]:
        branches = zip(self._parts, form["masters"], strict=True)
        return [pair for parts, saved in branches for pair in zip(parts, saved["parts"], strict=True)]

    def state_dict(self) -> dict[str, Any]:
        engine = self.engine
        scaler = vars(engine.optimizer.loss_scaler) if loss_scale(engine.optimizer) is not None else {}
        scheduler = engine.lr_scheduler
        groups = self.optimizer.param_groups
        return {
            "masters": [self._read(number) for number in range(len(self._masters))],
            "settings": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "untrained": _untrained(engine),
            "counters": {name: int(getattr(engine, name)) for name in _COUNTERS},
            "scaler": {name: value for name, value in scaler.items() if isinstance(value, int | float)},
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
        }

    def _read(self, number: int) -> dict[str, Any]:
        master = self._masters[number]
        state = self.optimizer.state.get(master, {})
        flat = {key: value for key, value in state.items() if _is_like(value, master)}
        return {
            "parts": [
                {"master": part, "state": {key: part.of(value) for key, value in flat.items()}}
                for part in self._parts[number]
            ],
            "values": {key: value for key, value in state.items() if key not in flat},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state; a collective call, in which ranks get all weights from the masters."""
        engine = self.engine
        for number, saved in enumerate(state["masters"]):
            self._write(number, saved)
        for group, settings in zip(self.optimizer.param_groups, state["settings"], strict=True):
            group.update(settings)
        engine.module.load_state_dict(state["untrained"], strict=False)
        for name, value in state["counters"].items():
            setattr(engine, name, value)
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        for name, value in state["scaler"].items():
            setattr(engine.optimizer.loss_scaler, name, value)
        if state["scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(state["scheduler"])
        _update_weights(engine.optimizer)

    def _write(self, number: int, saved: Mapping[str, Any]) -> None:
        master, state = self._masters[number], dict(saved["values"])
        for part, found in zip(self._parts[number], saved["parts"], strict=True):
            part.data.copy_(found["master"].data)
            for key, value in found["state"].items():
                flat = state.setdefault(key, torch.zeros_like(master, dtype=value.data.dtype))
                part.of(flat).data.copy_(value.data)
        self.optimizer.state[master] = state


def _why_unknown(engine: DeepSpeedEngine) -> str | None:
    """Return what of an engine is not known here, before any of it is touched."""
    optimizer, world = engine.optimizer, dist.get_world_size()
    if type(optimizer) not in _KNOWN:
        return f"its state is that of {type(optimizer).__name__}, ZeRO stage {int(engine.zero_optimization_stage())}"
    if engine.dp_world_size != world:
        return "its ranks are not all data-parallel replicas"
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _why_stage_3_unknown(engine)
    if getattr(optimizer, "round_robin_gradients", False):
        return "round_robin_gradients orders parameters by the number of ranks"
    if any(map(any, getattr(optimizer, "round_robin_bit16_padding", []))):
        return "parameter_alignment puts padding between parameters"
    return None


def _why_stage_3_unknown(engine: DeepSpeedEngine) -> str | None:
    if engine.zero_hpz_partition_size() > 1:
        return "its parameters are cut on some of the ranks only"
    if engine.optimizer.swap_optimizer or engine.optimizer.params_in_nvme_and_cpu:
        return "parts of its state are on NVMe"
    if not all(parameter.requires_grad for parameter in engine.module.parameters()):
        return "with ZeRO stage 3, parameters that are not trained are cut, too"
    return None


def _masters(optimizer: Any) -> list[Tensor]:
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(optimizer.fp32_partitioned_groups_flat)
    return [part.master for part in partitions(optimizer)]


def _parts(optimizer: Any, masters: list[Tensor]) -> Iterator[list[FlatPart]]:
    """Yield the parts that are in each of the masters."""
    rank = dist.get_rank()
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        groups = optimizer.bf16_groups if isinstance(optimizer, BF16_Optimizer) else optimizer.bit16_groups
        for master, group in zip(masters, groups, strict=True):
            whole = sum(parameter.numel() for parameter in group)
            yield [FlatPart.in_tensor(master, 0, master.numel(), whole, rank)]
        return
    for master, group in zip(masters, optimizer.fp16_groups, strict=True):
        found, offset = [], 0
        for parameter in group:
            size = parameter.ds_tensor.ds_numel
            found.append(FlatPart.in_tensor(master, offset, size, parameter.ds_numel, rank))
            offset += size
        yield found


def _update_weights(optimizer: Any) -> None:
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.update_lp_params()
        return
    # As at the end of a step.
    optimizer._partition_all_parameters()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _is_like(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == master.shape


def _untrained(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Return what the module has that the optimizer does not change."""
    named = engine.module.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in named if parameter.requires_grad}
    state = engine.module.state_dict().items()
    return {key: value for key, value in state if isinstance(value, Tensor) and key not in trained}
