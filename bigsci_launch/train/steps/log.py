"""Prints and records the result of each step, on the one rank that tells."""

from __future__ import annotations

import math

from bigsci_launch.plan.shape.parameters import ModelShape
from bigsci_launch.plan.shape.tflops import MODEL_PASSES, full_flops
from bigsci_launch.train.device.gpu import computes_on_gpu, memory_figures
from bigsci_launch.train.parallel.attention import describe_attention
from bigsci_launch.train.parallel.compiled import describe_compilation
from bigsci_launch.train.parallel.fp8 import describe_fp8
from bigsci_launch.train.parallel.optimizer import gradient_norm, loss_scale
from bigsci_launch.train.parallel.pipeline import describe_layout
from bigsci_launch.train.steps.companion import Built, Companion, RankSetup, Start, StepDone
from bigsci_launch.train.steps.log_line import StepResult, format_step, step_record


class StepLog(Companion):
    def __init__(self, setup: RankSetup) -> None:
        self._setup, self._shape = setup, ModelShape.of_config(setup.config)

    def after_build(self, built: Built) -> None:
        self._built = built

    def begin(self, start: Start) -> None:
        """Say what is trained on which ranks, and from where on."""
        config, topology = self._built.config, self._setup.topology
        if config.parallelism.engine == "uneven":
            lines = self._built.engine.layout.lines()
        else:
            lines = [f"topology {topology}: {topology.world_size} ranks", *describe_layout(config, topology)]
        print(*lines, *self._kernels(), sep="\n", flush=True)
        print(f"starting after step {start.progress.step} of {config.training.steps}", flush=True)

    def _kernels(self) -> list[str]:
        training, engine = self._built.config.training, self._built.engine
        size, length = engine.micro_batch_size, self._built.config.model.sequence_length
        return [
            *(describe_attention(engine.module, size, length) if computes_on_gpu() else ()),
            *((describe_compilation(),) if training.compile else ()),
            *((describe_fp8(engine.module, size * length),) if training.precision == "fp8" else ()),
        ]

    def after_step(self, done: StepDone) -> None:
        result = self._result(done)
        print(format_step(result), flush=True)
        self._setup.report.event("step", **step_record(result))

    def _result(self, done: StepDone) -> StepResult:
        config, engine = self._setup.config, self._built.engine
        passes = MODEL_PASSES + (config.training.activation_checkpointing is True)
        peak = config.monitor.peak_tflops_per_rank
        return StepResult(
            step=done.progress.step,
            num_steps=config.training.steps,
            consumed_samples=done.progress.consumed_samples,
            sequence_length=config.model.sequence_length,
            learning_rate=done.learning_rate,
            global_batch_size=done.batch_size,
            micro_batch_size=engine.micro_batch_size,
            loss=done.loss,
            grad_norm=gradient_norm(engine),
            num_skipped=int(done.is_skipped),
            num_nan=int(math.isnan(done.loss)),
            seconds=done.seconds,
            tflops=self._tflops(done, passes),
            utilization=self._tflops(done, MODEL_PASSES) / peak if peak else None,
            memory=memory_figures(),
            loss_scale=loss_scale(engine.optimizer),
            planned_s=engine.layout.seconds if config.parallelism.engine == "uneven" else None,
        )

    def _tflops(self, done: StepDone, passes: int) -> float:
        """Return the TFLOP/s of one rank; recomputation is a fourth pass, which makes no progress."""
        topology = self._setup.topology
        flops = full_flops(self._shape, topology.tp, done.batch_size, passes)
        return flops / (done.seconds * topology.world_size * 1e12)
