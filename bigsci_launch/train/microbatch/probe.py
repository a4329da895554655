"""Tries a size of micro-batches on this rank alone: what is in flight at its stage, forward and backward.

The engine's own instructions run, with everything that they communicate left out. So no rank waits for one that
runs out of memory here, the memory is that of a real step, and the tapes of what each instruction communicates are
there before the first real one. Afterwards the engine has the buffers and shapes of this size.

DeepSpeed allocates AdamW's moments in the first step, and NCCL its buffers. Both are made before, so that no step can
fail for want of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import PartitionedTensor
from torch import Tensor

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.guards.engine.watch import EngineGuards
from bigsci_launch.train.microbatch.agreement import Agreement, discard, forget_reduction, says_shortage
from bigsci_launch.train.microbatch.traffic import Traffic
from bigsci_launch.train.parallel.tensor import TensorParallel
from bigsci_launch.train.rank.rng import capture_generators, restore_generators


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """What one rank found when it tried a size."""

    size: int
    fits: bool
    place: str | None = None
    """The instruction in which it ran out of memory."""
    seconds: float = 0.0
    """Forward and backward pass of one micro-batch."""
    used_bytes: int | None = None
    """Memory of the device in use at the peak, by all that runs on it; None on a CPU, where it is not counted."""
    retries: int = 0
    """How often torch had to empty its cache to serve a request: a size that needs that is too large."""


class Prober:
    """Tries sizes on one rank. Nothing that it does changes how training continues."""

    def __init__(
        self,
        engine: PipelineEngine,
        config: RunConfig,
        traffic: Traffic,
        agreement: Agreement,
        dp: int,
        guards: EngineGuards | None,
    ) -> None:
        self._engine, self._config, self._traffic, self._agreement = engine, config, traffic, agreement
        self._dp, self._guards = dp, guards
        self._is_warm = False

    def prepare(self, size: int) -> None:
        """Set the engine to micro-batches of `size`, with the buffers for it; not a collective call."""
        set_size(self._engine, size, self._dp)
        reset_buffers(self._engine, self._activation(size))

    def try_training(self, size: int) -> SizeTrial:
        """Set the engine to micro-batches of `size`, and try forward and backward; not a collective call."""
        self._engine.module.train()
        with torch.enable_grad():
            return self._try(size, self._forward_and_backward)

    def try_evaluation(self, size: int) -> SizeTrial:
        """Try the forward pass of an evaluation; not a collective call."""
        self._engine.module.eval()
        with torch.no_grad():
            trial = self._try(size, self._forward_alone)
        self._engine.module.train()
        return trial

    def _try(self, size: int, work: Callable[[int], float]) -> SizeTrial:
        generators, retries = capture_generators(), num_retries()
        self._kind: type = schedule.RecvActivation  # the buffers are made first
        try:
            self.prepare(size)
            self._traffic.forget(lambda key: key.is_training is self._engine.module.training)
            if not self._is_warm or self._config.training.compile:
                # The first pass takes longer: it fills caches, and compiles for this size.
                work(size)
                self._is_warm = True
            seconds = work(size)
            trial = SizeTrial(size, True, None, seconds, _used(), num_retries() - retries)
        except RuntimeError as error:
            if not says_shortage(error):
                raise
            trial = SizeTrial(size, False, self._kind.__name__, used_bytes=_used(), retries=num_retries() - retries)
        discard(self._engine)
        if self._guards:
            self._guards.forget_step()
        restore_generators(generators)
        return trial

    def _forward_and_backward(self, size: int) -> float:
        engine = self._engine
        in_flight = min(engine.num_stages - engine.stage_id, engine.micro_batches)
        engine._reserve_pipe_buffers(max(2, in_flight))
        engine.total_loss, engine.fwd_outputs, engine._compute_loss = None, [], True
        batch = self._batch(size)
        started = _now()
        for buffer in range(in_flight):
            self._forward(buffer, batch)
        for buffer in range(in_flight):
            if not engine.is_last_stage():
                self._run(schedule.RecvGrad, buffer)
                self._describe_gradient(buffer)
            self._run(schedule.BackwardPass, buffer)
            if not engine.is_first_stage():
                self._run(schedule.SendGrad, buffer)
        seconds = (_now() - started) / float(in_flight)
        self._reduce()
        return seconds

    def _reduce(self) -> None:
        """Reduce the gradients, once as in a step that the guards check, and once as in one that they do not."""
        # ZeRO-1 takes the gradients away when it reduces them.
        gradients = [(each, each.grad, getattr(each, "grad_accum", None)) for each in self._engine.module.parameters()]
        for is_checked in (True, False) if self._guards else (False,):
            for parameter, gradient, accumulated in gradients:
                parameter.grad, parameter.grad_accum = gradient, accumulated
            with self._guards.as_in_step(is_checked=is_checked) if self._guards else nullcontext():
                for kind in (schedule.ReduceTiedGrads, schedule.ReduceGrads):
                    self._run(kind)
            forget_reduction(self._engine.optimizer)

    def _describe_gradient(self, buffer: int) -> None:
        """Write what the next stage would send: how the gradient is split over tp, as the activation is."""
        if self._engine.is_grad_partitioned:
            self._engine.grad_layer[0].copy_(self._engine.pipe_buffers["outputs"][buffer][0])

    def _forward_alone(self, size: int) -> float:
        engine = self._engine
        engine._reserve_pipe_buffers(2)
        engine.total_loss, engine.fwd_outputs, engine._compute_loss = None, [], True
        started = _now()
        self._forward(0, self._batch(size))
        return _now() - started

    def _forward(self, buffer: int, batch: tuple[Tensor, Tensor]) -> None:
        engine = self._engine
        if not engine.is_first_stage():
            self._run(schedule.RecvActivation, buffer)
        if engine.is_first_stage() or engine.is_last_stage():
            engine.set_dataiterator(iter([batch]))
            self._run(schedule.LoadMicroBatch, buffer)
        self._run(schedule.ForwardPass, buffer)
        if not engine.is_last_stage():
            self._run(schedule.SendActivation, buffer)

    def _run(self, kind: type, *buffer: int) -> None:
        self._kind = kind
        with self._traffic.inside(self._agreement.key(kind), is_muted=True):
            self._agreement.instructions[kind](self._engine, *buffer)

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(size, self._config.model.sequence_length, dtype=torch.int64)
        return tokens, tokens.clone()

    def _activation(self, size: int) -> Callable[[], Tensor]:
        shape = size, self._config.model.sequence_length, self._config.model.hidden_size
        dtype = next(self._engine.module.parameters()).dtype
        return lambda: torch.zeros(shape, dtype=dtype, device=self._engine.device)


def set_size(engine: PipelineEngine, size: int, dp: int) -> None:
    """Let the engine use micro-batches of `size`; its global batch stays, so their number follows."""
    batch_size = engine.train_batch_size()
    engine.set_train_micro_batch_size(size)
    engine.micro_batch_size = size
    engine._config.train_batch_size = batch_size
    engine.set_train_batch_size(batch_size)
    assert engine.micro_batches * size * dp == batch_size
    # A checkpoint holds it.
    engine.config.update(train_micro_batch_size_per_gpu=size, gradient_accumulation_steps=engine.micro_batches)


def reset_buffers(engine: PipelineEngine, make_activation: Callable[[], Tensor]) -> None:
    """Give the engine the buffers that it receives into. Otherwise stages tell each other the shapes in a first step,
    which a rank that runs out of memory there could not take part in."""
    engine.reset_activation_shape()
    if engine.num_stages == 1:
        return
    engine.first_output_send = False
    if engine.is_first_stage():
        return
    activation = make_activation()
    if engine.is_pipe_partitioned:
        part = PartitionedTensor(tensor=activation, group=engine.grid.get_slice_parallel_group())
        engine.pipe_recv_buf = (part.to_meta(), part.data())
    else:
        engine.pipe_recv_buf = activation


def open_communicators(engine: PipelineEngine) -> None:
    """Use every group of ranks that a step uses, once: NCCL allocates the buffers of a group when it is first used. A
    collective call; stages have opened their connections when the engine was built."""
    grid = engine.grid
    groups = [None, grid.get_data_parallel_group(), grid.get_model_parallel_group(), grid.get_slice_parallel_group()]
    groups += [group for _, group in engine.module.get_tied_weights_and_groups()]
    places = (getattr(module, "ranks", None) for module in engine.module.modules())
    groups += [each.group for each in places if isinstance(each, TensorParallel) and each.size > 1][:1]
    for group in groups:
        dist.all_reduce(torch.zeros(1, device=engine.device), group=group)


def make_moments(optimizer: Any) -> None:
    """Make the state that AdamW would make in its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                on_device = parameter.device if group.get("fused") else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=on_device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _now() -> float:
    """Return the time, once the device has done all that it was asked to: calls do not wait for it."""
    if computes_on_gpu():
        torch.cuda.synchronize()
    return time.monotonic()


def num_retries() -> int:
    return int(torch.cuda.memory_stats()["num_alloc_retries"]) if computes_on_gpu() else 0


def _used() -> int | None:
    """Return what is in use now: until its cache is emptied, torch keeps all that it has needed."""
    if not computes_on_gpu():
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
