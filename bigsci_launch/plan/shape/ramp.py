"""The batch-size ramp-up as phases of one batch size each, by Megatron's rule, which `bsl train` follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigsci_launch.config.schema.run import TrainingSection


@dataclass(frozen=True, slots=True)
class Phase:
    """Consecutive steps with one global batch size; `first_step` counts from 1."""

    global_batch_size: int
    first_step: int
    num_steps: int

    @property
    def num_samples(self) -> int:
        return self.global_batch_size * self.num_steps


def phases_of(training: TrainingSection) -> tuple[Phase, ...]:
    """Return the phases of a run in order; together they have `training.steps` steps."""
    phases: list[Phase] = []
    done, left = 0, training.steps
    for size, until in _sizes(training):
        steps = left if until is None else min(left, -(-max(0, until - done) // size))
        if steps:
            phases.append(Phase(size, training.steps - left + 1, steps))
            done, left = done + size * steps, left - steps
    return tuple(phases)


def _sizes(training: TrainingSection) -> Iterator[tuple[int, int | None]]:
    """Yield every batch size with the number of consumed samples at which it ends; the last has no end."""
    ramp, goal = training.rampup, training.global_batch_size
    if ramp is not None and ramp.start < goal:
        increments = (goal - ramp.start) // ramp.increment
        for index in range(increments):
            # The size changes with the first step that begins at or after this many samples.
            yield ramp.start + index * ramp.increment, -(-(index + 1) * ramp.samples // increments)
    yield goal, None


def count_samples(phases: tuple[Phase, ...]) -> int:
    return sum(phase.num_samples for phase in phases)


def filling_batch_size(micro_batch_size: int, dp: int, pp: int) -> int:
    """Return the smallest global batch size that gives every stage a micro batch at the same time."""
    return micro_batch_size * dp * pp
