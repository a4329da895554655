"""Injects faults by rank and step, for tests and demonstrations. Each writes a `fault` event first."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from bigsci_launch.config.schema.guards import FaultSpec
from bigsci_launch.errors import ConfigError
from bigsci_launch.train.fault_injection.budget import MemoryBudget, build_within
from bigsci_launch.train.fault_injection.defects import Defects
from bigsci_launch.train.parallel.pipeline import Build
from bigsci_launch.train.parallel.tensor import ColumnParallelLinear, TensorParallel
from bigsci_launch.train.steps.companion import Built, Companion, RankSetup, Start


class Faults(Companion):
    """The faults of one rank, and the defects that all ranks share."""

    def __init__(self, setup: RankSetup) -> None:
        self._all, self._rank, self._report = setup.config.faults, setup.identity.rank, setup.report
        self._defects = Defects(self._all, self._rank)

    def before_build(self, build: Build) -> Build:
        rule = build_within(self._all, self._rank, self._defects.group_rule)
        return replace(build, embedding=self._defects.embedding, group_rule=rule)

    def after_build(self, built: Built) -> None:
        self._engine = built.engine
        self._defects.stand_at_saves(built.engine)
        self._budget = MemoryBudget(self._all, self._rank, built.engine)
        kinds = ("hang", "skip", "die", "slow")
        self._specs = [each for each in self._all if each.rank == self._rank and each.kind in kinds]
        skips = any(spec.kind == "skip" for spec in self._specs)
        if skips and not (built.engine.is_model_parallel or built.engine.is_data_parallel):
            raise ConfigError("faults: skip: with tp 1 and dp 1 there is no collective to leave out")

    def prepare(self, start: Start) -> None:
        # Each of the others occurs once, so an earlier generation has begun it already.
        self._specs = [each for each in self._specs if each.kind == "slow" or each.step > start.reached]
        self._budget.begin_step(start.progress.step + 1)
        if start.folder is not None:
            self._defects.after_load(start.progress.step)

    def around_step(self, step: int, work: Callable[[], float]) -> float:
        self._budget.begin_step(step)
        self._begin_due(step)
        return work()

    def _begin_due(self, step: int) -> None:
        for defect in self._defects.before_step(step, self._engine):
            self._report.event("fault", fault=defect, seconds=None)
        for spec in self._specs:
            if spec.step == step:
                self._report.event("fault", fault=spec.kind, seconds=spec.seconds if spec.kind == "slow" else None)
                self._begin(spec)
            if spec.kind == "slow" and step >= spec.step:
                time.sleep(spec.seconds)

    def _begin(self, spec: FaultSpec) -> None:
        if spec.kind == "hang":
            hang_for_ever()
        elif spec.kind == "die":
            self._report.close()
            os.kill(os.getpid(), signal.SIGKILL)
        elif spec.kind == "skip":
            skip_collective(self._engine)


def hang_for_ever() -> None:
    """Sleep for ever; the name of this function is what a stack shows."""
    while True:
        time.sleep(3600)


def skip_collective(engine: PipelineEngine) -> None:
    """Leave out one collective of the coming step, chosen so that every other collective still meets its partners.

    With tensor parallelism it is the last all-reduce of the backward pass. Without, it is the last data-parallel
    collective: the mean of the loss on the last stage, the all-gather of the new weights on the other stages. So the
    other ranks wait in a collective that this rank has already passed.
    """
    layers = [module for module in engine.module.modules() if isinstance(module, ColumnParallelLinear)]
    if layers and layers[0].ranks.size > 1:
        layers[0].ranks = Skipping(layers[0].ranks, engine.micro_batches)
    elif engine.is_last_stage():
        engine.is_data_parallel = False
    else:
        for module in (bf16_optimizer, stage_1_and_2):
            module.all_gather_dp_groups = lambda *args, **kwargs: None


class Skipping(TensorParallel):
    """Tensor-parallel ranks that leave out the `skipped`-th all-reduce from now (counted from 1)."""

    def __init__(self, ranks: TensorParallel, skipped: int) -> None:
        super().__init__(ranks.rank, ranks.size, ranks.group)
        self._remaining = skipped

    def all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `tensor` over the tensor-parallel ranks, in place, except for the skipped call."""
        self._remaining -= 1
        if self._remaining != 0:
            super().all_reduce(tensor, operation)
