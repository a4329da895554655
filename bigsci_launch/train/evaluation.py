"""The loss on held-out samples, the same ones each time. Training goes on as if it had not been asked.

Nothing is drawn and nothing is kept: dropout is off, gradients are off, and the samples are a list of their own.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from deepspeed.runtime.pipe.engine import PipelineEngine

from bigsci_launch.config.schema import RunConfig
from bigsci_launch.topology import Topology
from bigsci_launch.train.batches import Batches


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation gave: the mean loss over `num_samples`, the same on every rank, and its seconds."""

    loss: float
    num_samples: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(20.0, self.loss))


def is_evaluation_due(config: RunConfig, step: int) -> bool:
    """Whether the run evaluates after `step`."""
    interval = config.monitor.eval_interval
    return interval is not None and config.data.held_out > 0 and step % interval == 0


def evaluate(engine: PipelineEngine, batches: Batches, config: RunConfig, topology: Topology) -> Evaluation:
    """The loss on `monitor.eval_batches` held-out global batches; a collective call."""
    started = time.monotonic()
    num_samples = config.monitor.eval_batches * config.training.global_batch_size
    num_micro_batches = num_samples // (config.training.micro_batch_size * topology.dp)
    loss = engine.eval_batch(batches.held_out(num_micro_batches), num_micro_batches=num_micro_batches)
    return Evaluation(float(loss), num_samples, time.monotonic() - started)


def format_evaluation(evaluation: Evaluation, step: int) -> str:
    """The line of the log, as Megatron's parsers read it."""
    return (
        f" validation loss at iteration {step} | lm loss value: {evaluation.loss:.6E} | "
        f"lm loss PPL: {evaluation.perplexity:.6E} |"
    )
