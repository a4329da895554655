"""Sums over tensor-parallel ranks what sequence parallelism leaves apart: the gradients of parameters that they copy.

Norms, biases of row-parallel layers and positions see only the rank's own part of each sequence. Their gradients are
summed once in a step: after the last micro-batch, before anything reads them for data-parallel ranks or clipping.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from bigsci_launch.train.parallel.optimizer import local_gradient
from bigsci_launch.train.parallel.tensor import TensorParallel


def parameters_of_parts(module: nn.Module, ranks: TensorParallel) -> list[nn.Parameter]:
    """Return the parameters that every rank copies and that see only its part of the sequences."""
    if ranks.parts == 1:
        return []
    return [each for each in module.parameters() if not getattr(each, "model_parallel", False)]


def sum_gradients_of_parts(engine: PipelineEngine, ranks: TensorParallel) -> None:
    """Let `engine` sum these gradients over the ranks, once those of tied weights are summed over the stages."""
    parameters = parameters_of_parts(engine.module, ranks)
    if not parameters:
        return
    original = engine._INSTRUCTION_MAP[schedule.ReduceTiedGrads]

    def run(engine: PipelineEngine, *arguments: Any, **named: Any) -> None:
        original(engine, *arguments, **named)
        _sum(parameters, ranks)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: run}


@torch.no_grad()
def _sum(parameters: list[nn.Parameter], ranks: TensorParallel) -> None:
    gradients = [each for parameter in parameters if (each := local_gradient(parameter)) is not None]
    if gradients:
        total = torch.cat([each.reshape(-1) for each in gradients])
        ranks.all_reduce(total)
        parts = torch.split(total, [each.numel() for each in gradients])
        torch._foreach_copy_(gradients, [part.view_as(each) for part, each in zip(parts, gradients, strict=True)])
