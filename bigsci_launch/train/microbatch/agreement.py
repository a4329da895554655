"""All ranks agree whether a step is applied, when one of them may have run out of memory in it.

The rank that runs out lets go of what it holds, makes the calls that its instruction still owes to its peers, and goes
through the rest of the schedule with communication alone, the reduction of the gradients included. Its peers compute
with zeros, and notice nothing. Before the optimizer's step, where all ranks wait for each other anyway, one MAX tells
them whether any rank ran out. If so, all of them discard the step: nothing was applied. So no rank waits for longer
than a step takes.

Where that is not possible (an instruction that never ran before, the optimizer's step itself, a second failure), the
error leaves the schedule on one rank alone: with `survive` a new generation begins, without it the attempt ends.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.microbatch.traffic import Instruction, Traffic, UnknownCallsError
from bigsci_launch.train.rank.collective import gather
from bigsci_launch.train.rank.stop import drop_frames

_WORDS = ("CUDA error: out of memory", "HIP error: out of memory", "STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class Shortage:
    """A rank has run out of memory: where in the step, and what it says of it."""

    rank: int
    place: str
    text: str


def says_shortage(error: RuntimeError) -> bool:
    """Return whether `error` says that the device's memory is short.

    torch's allocator has an error of its own. What asks the device directly has not: the driver that loads a kernel,
    cuBLAS, cuDNN. NCCL is no such case, because a communicator that has failed cannot be used again.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return not isinstance(error, dist.DistError) and any(words in str(error) for words in _WORDS)


class StepDiscarded(Exception):
    """All ranks have discarded a step, or an evaluation, because these ran out of memory."""

    def __init__(self, shortages: list[Shortage]) -> None:
        super().__init__(", ".join(f"rank {each.rank} in {each.place}" for each in shortages))
        self.shortages = shortages


class Agreement:
    """Stands around every instruction of the engine's schedules, outside of everything else that does."""

    def __init__(self, engine: PipelineEngine, rank: int, traffic: Traffic, is_armed: Callable[[], bool]) -> None:
        self._engine, self._rank, self._traffic, self._is_armed = engine, rank, traffic, is_armed
        self._shortage: Shortage | None = None
        self._flag = torch.zeros(1, dtype=torch.int32, device=engine.device)
        self.instructions = dict(engine._INSTRUCTION_MAP)
        engine._INSTRUCTION_MAP = {kind: self._guarded(kind, run) for kind, run in self.instructions.items()}
        self._exec_schedule = engine._exec_schedule
        engine._exec_schedule = self._exec

    def key(self, kind: type) -> Instruction:
        """Return what decides which calls an instruction makes, next to the size of micro-batches."""
        is_checked = kind in (schedule.ReduceTiedGrads, schedule.ReduceGrads) and self._is_armed()
        return Instruction(kind.__name__, bool(self._engine.module.training), is_checked)

    def run(self, work: Callable[[], Any]) -> Any:
        """Run a step or an evaluation and return its result; a collective call.

        Raises:
            StepDiscarded: a rank ran out of memory; every rank raises it, and nothing was applied.
            RuntimeError: this rank ran out where its peers cannot be notified (`says_shortage`).
        """
        self._shortage = None
        try:
            return work()
        except StepDiscarded:
            discard(self._engine)
            raise

    def _exec(self, steps: Any) -> None:
        self._exec_schedule(steps)
        if not self._engine.module.training:
            self._agree()

    def _guarded(self, kind: type, run: Callable[..., None]) -> Callable[..., None]:
        def guarded(engine: PipelineEngine, *arguments: Any, **keywords: Any) -> None:
            if kind is schedule.OptimizerStep:
                self._agree()
                run(engine, *arguments, **keywords)
            elif self._shortage is None:
                self._attempt(kind, lambda: run(engine, *arguments, **keywords))
            else:
                self._traffic.repeat(self.key(kind))

        return guarded

    def _attempt(self, kind: type, work: Callable[[], None]) -> None:
        key = self.key(kind)
        try:
            with self._traffic.inside(key):
                work()
        except RuntimeError as error:
            if not says_shortage(error):
                raise
            self._shortage = Shortage(self._rank, kind.__name__, str(error).splitlines()[0])
            let_go(self._engine, error)
            try:
                self._traffic.finish(key)
            except UnknownCallsError:
                raise torch.OutOfMemoryError(self._shortage.text) from None

    def _agree(self) -> None:
        """Return if no rank has run out of memory in this step; a collective call."""
        self._flag.fill_(self._shortage is not None)
        dist.all_reduce(self._flag, op=dist.ReduceOp.MAX)
        if int(self._flag):
            raise StepDiscarded([each for each in gather(self._shortage) if each is not None])


def let_go(engine: PipelineEngine, error: BaseException | None = None) -> None:
    """Free the activations of a step that is discarded, and return the cache to the device.

    The frames of the error go first: they hold the activations of the layer that failed.
    """
    drop_frames(error)
    for key, buffers in engine.pipe_buffers.items():
        engine.pipe_buffers[key] = [None] * len(buffers)
    engine.loss = torch.zeros((), device=engine.device)
    engine.fwd_outputs = []
    gc.collect()
    if computes_on_gpu():
        torch.cuda.empty_cache()


def discard(engine: PipelineEngine) -> None:
    """Set the engine back to where the step began: no gradients, no activations, no half-done reduction."""
    optimizer = engine.optimizer
    optimizer.zero_grad()
    forget_reduction(optimizer)
    engine._force_grad_boundary = engine._running_engine_backward = False
    engine.module.micro_offset = 0
    engine.timers("train_batch").started_ = False
    let_go(engine)


def forget_reduction(optimizer: Any) -> None:
    """Let the optimizer forget that it has begun to reduce gradients. The bf16 optimizer keeps no note of that."""
    if isinstance(optimizer, BF16_Optimizer):
        return
    optimizer._release_ipg_buffers()
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    # Other parts of DeepSpeed hold these objects, so they are changed and not replaced.
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        gradients.update(dict.fromkeys(gradients))
    reduced = optimizer.params_already_reduced
    reduced[:] = [False] * len(reduced)
