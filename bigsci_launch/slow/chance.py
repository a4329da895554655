"""What chance alone would give: intervals of the mean of steps, by drawing the steps again."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bigsci_launch.slow.straggler import Cost

NUM_DRAWS = 500


def interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """Return the interval in which the mean of such values is, with a probability of `level`."""
    draws = random.Random(len(values))
    means = sorted(sum(draws.choices(values, k=len(values))) / len(values) for _ in range(NUM_DRAWS))
    outside = int(NUM_DRAWS * (1 - level) / 2)
    return means[outside], means[-1 - outside]


def is_surely_above(values: Sequence[float], bound: float) -> bool:
    """Whether the mean of such values is above a bound, but for one case in 200, and not by one or two values alone."""
    return interval(values, 0.99)[0] > bound


def cost_of(gains: Sequence[float], step_s: float) -> Cost:
    """Return the cost of what would have made each step shorter by `gains` seconds."""
    mean = sum(gains) / len(gains)
    low, high = interval(gains, 0.95)
    return Cost(mean * 1e3, low * 1e3, high * 1e3, mean / step_s, low / step_s, high / step_s)
