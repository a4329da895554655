"""The schedules of the learning rate and the global batch size, as pure functions of the run's progress."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bigsci_launch.config.schema.run import OptimizerSection, TrainingSection


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Linear warm-up from zero to `peak`, cosine decay to `floor` at `decay_steps`, then constant `floor`."""

    peak: float
    floor: float
    warmup_steps: int
    decay_steps: int

    @classmethod
    def of_config(cls, optimizer: OptimizerSection, training: TrainingSection) -> LearningRate:
        """Return the schedule of a run file; without `decay_steps`, decay lasts until the last step."""
        return cls(
            peak=optimizer.learning_rate,
            floor=optimizer.min_learning_rate,
            warmup_steps=optimizer.warmup_steps,
            decay_steps=optimizer.decay_steps or training.steps,
        )

    def at(self, step: int) -> float:
        """Return the rate of optimizer step `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if step >= self.decay_steps:
            return self.floor
        done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Global batch size by consumed samples: grows from `start` to `full` by `increment`, evenly over `samples`.

    Same as Megatron's `--rampup-batch-size START INCREMENT SAMPLES`; without a ramp, `start` is `full`.
    """

    full: int
    start: int
    increment: int = 0
    samples: int = 0

    @classmethod
    def of_config(cls, training: TrainingSection) -> BatchSize:
        """Return the batch sizes of a run file."""
        ramp = training.rampup
        if ramp is None:
            return cls(full=training.global_batch_size, start=training.global_batch_size)
        return cls(training.global_batch_size, ramp.start, ramp.increment, ramp.samples)

    def at(self, consumed_samples: int) -> int:
        """Return the size of the step that begins after `consumed_samples`."""
        if self.start >= self.full:
            return self.full
        num_increments = (self.full - self.start) // self.increment
        passed = consumed_samples * num_increments // self.samples
        return min(self.full, self.start + self.increment * passed)
