"""Gives each pipeline the micro batches that its speed asks for, once that is measured.

The first stage has the last backward pass, so its time is that of the pipeline. All ranks have the same seconds, from
the sum that ends each step, and so find the same layout in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.plan.survive.uneven import UnevenLayout, balanced_layout

WARM_UP, WINDOW = 2, 16
"""Steps whose time does not count after a change, and steps whose median does."""
GAIN = 0.05
"""The share of the step that a change must save: each one has another order of sums."""


class PipelineSpeeds:
    """The seconds that the passes of each pipeline take. Where sums must have one order, nothing changes."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._steps: list[Sequence[float]] = []

    def after_step(self, layout: UnevenLayout, seconds: Sequence[float]) -> UnevenLayout | None:
        """Return the layout from the next step on, if another one than `layout` is faster."""
        self._steps.append(seconds)
        if len(self._steps) < WARM_UP + WINDOW:
            return None
        taken = [median(each) for each in zip(*self._steps[WARM_UP:], strict=True)]
        self._steps = []
        if self._config.training.deterministic or len(taken) == 1 or min(taken) > (1 - GAIN) * max(taken):
            return None
        found = balanced_layout(self._config, layout, taken)
        return found if found.seconds < (1 - GAIN) * max(taken) else None
