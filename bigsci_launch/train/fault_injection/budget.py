"""Lets a rank run out of memory at a chosen place, as a small device would: a fault of kind `out_of_memory`.

From `step` on, the place raises torch's own error whenever the micro-batches are larger than `above`. As on a real
device, a smaller size passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage_1_and_2
from torch import nn

from bigsci_launch.config.schema.guards import FaultSpec
from bigsci_launch.train.parallel.model import TransformerLayer
from bigsci_launch.train.parallel.optimizer import GroupRule
from bigsci_launch.train.parallel.tensor import TensorParallel

_INSTRUCTIONS = {
    "load": schedule.LoadMicroBatch,
    "receive_activation": schedule.RecvActivation,
    "receive_gradient": schedule.RecvGrad,
    "tied_reduction": schedule.ReduceTiedGrads,
    "reduction": schedule.ReduceGrads,
}


def build_within(specs: Sequence[FaultSpec], rank: int, rule: GroupRule) -> GroupRule:
    """Return the rule of the optimizer's groups; it runs out of memory, in the build, if the run asks for that."""

    def run_out(name: str, parameter: nn.Parameter) -> str:
        raise torch.OutOfMemoryError("out of memory in build (injected by `faults`)")

    return run_out if any((spec.place, spec.rank) == ("build", rank) for spec in specs) else rule


class MemoryBudget:
    """The places of one rank that run out of memory, and the calls of each in a try of a step with one size."""

    def __init__(self, specs: Sequence[FaultSpec], rank: int, engine: PipelineEngine) -> None:
        self._specs = [each for each in specs if each.kind == "out_of_memory" and each.rank == rank]
        self._engine = engine
        self._step = 0
        self._num_calls: dict[tuple[str, int], int] = {}
        if not self._specs:
            return
        for name in ("train_batch", "eval_batch"):
            # Each try of a step counts from zero, and so does an evaluation after it.
            setattr(engine, name, _after(self._num_calls.clear, getattr(engine, name)))
        for place in {each.place for each in self._specs if each.place is not None}:
            self._stand_at(place)

    def begin_step(self, step: int) -> None:
        self._step = step
        self._num_calls.clear()

    def _spend(self, place: str) -> None:
        size = self._engine.micro_batch_size
        number = self._num_calls[place, size] = self._num_calls.get((place, size), 0) + 1
        for spec in self._specs:
            is_here = spec.place == place and self._step >= spec.step and number == spec.call
            if is_here and size > spec.above:
                raise torch.OutOfMemoryError(f"out of memory in {place} (injected by `faults`)")

    def _stand_at(self, place: str) -> None:
        engine = self._engine
        if place in _INSTRUCTIONS:
            self._stand_before_instruction(_INSTRUCTIONS[place], place)
        elif place in ("forward", "evaluation", "backward", "accumulation"):
            self._stand_in_layers(place)
        elif place == "collective":
            self._stand_in_tensor_parallel()
        elif place == "loss":
            self._stand_before(engine.module, "loss_fn", place)
        elif place == "norm":
            name = "get_grads_for_norm" if hasattr(engine.optimizer, "get_grads_for_norm") else "scaled_global_norm"
            self._stand_before(engine.optimizer, name, place)
        elif place == "optimizer":
            self._stand_before(engine.optimizer.optimizer, "step", place)
        elif place == "gather":
            for module in (bf16_optimizer, stage_1_and_2):
                self._stand_before(module, "all_gather_dp_groups", place)
        elif place == "save":
            self._stand_before(engine.checkpoint_engine, "_write", place)

    def _stand_before(self, holder: Any, name: str, place: str) -> None:
        setattr(holder, name, _after(partial(self._spend, place), getattr(holder, name)))

    def _stand_before_instruction(self, kind: type, place: str) -> None:
        instructions = self._engine._INSTRUCTION_MAP
        self._engine._INSTRUCTION_MAP = {**instructions, kind: _after(partial(self._spend, place), instructions[kind])}

    def _stand_in_layers(self, place: str) -> None:
        layers = [each for each in self._engine.module.modules() if isinstance(each, TransformerLayer)]
        for layer in layers[-1:]:
            if place != "accumulation":
                layer.register_forward_hook(lambda *seen: self._see_forward(place, seen))
                continue
            for parameter in layer.parameters():
                parameter.register_hook(lambda _: self._spend(place))  # type: ignore[no-untyped-call]

    def _see_forward(self, place: str, seen: tuple[nn.Module, Any, Any]) -> None:
        module, _, output = seen
        if (place == "forward" and module.training) or (place == "evaluation" and not module.training):
            self._spend(place)
        elif place == "backward" and output.requires_grad:
            output.register_hook(lambda _: self._spend(place))

    def _stand_in_tensor_parallel(self) -> None:
        for module in self._engine.module.modules():
            if isinstance(getattr(module, "ranks", None), TensorParallel):
                module.ranks = _Tight(module.ranks, self._spend)


def _after(first: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        first()
        return original(*arguments, **keywords)

    return run


class _Tight(TensorParallel):
    def __init__(self, ranks: TensorParallel, spend: Callable[[str], None]) -> None:
        super().__init__(ranks.rank, ranks.size, ranks.group)
        self._spend = spend

    def all_reduce(self, tensor: torch.Tensor, operation: Any = torch.distributed.ReduceOp.SUM) -> None:
        """Reduce `tensor` over the tensor-parallel ranks, in place, if the memory suffices."""
        self._spend("collective")
        super().all_reduce(tensor, operation)
