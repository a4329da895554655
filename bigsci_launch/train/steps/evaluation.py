"""Evaluates the loss on the same held-out samples each time, without changing how training continues.

An evaluation draws no random numbers and keeps no state: dropout and gradients are off, and its samples are separate.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from deepspeed.runtime.pipe.engine import PipelineEngine

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.topology import Topology
from bigsci_launch.train.samples.batches import Batches


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation: the mean loss over `num_samples`, the same on every rank, and how long it took."""

    loss: float
    num_samples: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(20.0, self.loss))


def is_evaluation_due(config: RunConfig, step: int) -> bool:
    interval = config.monitor.eval_interval
    return interval is not None and config.data.held_out > 0 and step % interval == 0


def evaluate(engine: PipelineEngine, batches: Batches, config: RunConfig, topology: Topology) -> Evaluation:
    """Evaluate the loss on `monitor.eval_batches` held-out global batches; a collective call.

    The batches are cut as the engine's micro-batches are at present.
    """
    started = time.monotonic()
    num_samples = config.monitor.eval_batches * config.training.global_batch_size
    num_micro_batches = num_samples // (engine.micro_batch_size * topology.dp)
    loss = engine.eval_batch(batches.held_out(num_micro_batches), num_micro_batches=num_micro_batches)
    return Evaluation(float(loss), num_samples, time.monotonic() - started)


def format_evaluation(evaluation: Evaluation, step: int) -> str:
    """Return the log line, in the format that Megatron's parsers read."""
    return (
        f" validation loss at iteration {step} | lm loss value: {evaluation.loss:.6E} | "
        f"lm loss PPL: {evaluation.perplexity:.6E} |"
    )
