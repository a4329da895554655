"""How much steps differ in published logs, drawn again in blocks: seconds, losses, norms of gradients.

`benchmarks/rows/watch_noise.csv` holds the rows, `benchmarks/rows/README.md` their sources.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROWS = Path(__file__).resolve().parents[1] / "rows" / "watch_noise.csv"
CALM = "aurora-torchtitan"
CALM_FROM = 40
"""Its first steps are those of a young model, whose loss falls and whose gradient jumps."""
BLOCK = 8
HALF = 5
HICCUP = 1 / 200
"""Not measured: how often a step takes 5 to 50 percent longer, as when a file system is busy."""
DRIFT, DRIFT_STEPS = 0.01, 300
"""Not measured: steps become longer and shorter again by so much, in so many steps, as with the heat of a room."""


@dataclass(frozen=True, slots=True)
class Residual:
    """A step next to those around it: relative difference of seconds and loss, logarithm of that of the gradient."""

    seconds: float
    loss: float
    grad_norm: float


def read_rows(source: str) -> list[tuple[int, float, float, float]]:
    """Return step, seconds, loss and norm of the gradient of one source."""
    with ROWS.open(encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["source"] == source]
    return [
        (int(row["step"]), float(row["seconds"]), float(row["loss"]), float(row["grad_norm"] or "nan")) for row in rows
    ]


def read_residuals() -> list[Residual]:
    """Return the residuals of the longest published log against its running median."""
    rows = [row for row in read_rows(CALM) if row[0] >= CALM_FROM]
    found = []
    for index, (_, seconds, loss, norm) in enumerate(rows):
        near = rows[max(0, index - HALF) : index + HALF + 1]
        usual = [statistics.median(each[column] for each in near) for column in (1, 2, 3)]
        found.append(Residual(seconds / usual[0] - 1, loss / usual[1] - 1, math.log(norm / usual[2])))
    return found


@dataclass(frozen=True, slots=True)
class Values:
    """What a step reports."""

    seconds: float
    loss: float
    grad_norm: float


LARGE_BATCH = 0.25
"""The loss of BLOOM, 2048 samples a step, differed by half a percent; that of the longest log by two."""
YOUNG = 0.5
"""By how much more than at the end the loss of a young model is at first."""


def draw_steps(
    seed: int,
    seconds: float,
    loss: float,
    grad_norm: float,
    *,
    times: float = 1.0,
    loss_times: float = 1.0,
    falls: float = YOUNG,
) -> Iterator[Values]:
    """Yield healthy steps around these values without end; `times` makes the measured noise of seconds larger."""
    draw, residuals, number = random.Random(seed), read_residuals(), 0
    while True:
        first = draw.randrange(len(residuals) - BLOCK)
        for residual in residuals[first : first + BLOCK]:
            number += 1
            slow = draw.uniform(1.05, 1.5) if draw.random() < HICCUP else 1.0
            falling = loss * (1 + falls * math.exp(-number / 2000))
            yield Values(
                seconds
                * (1 + times * residual.seconds)
                * slow
                * (1 + DRIFT * math.sin(number / DRIFT_STEPS * math.tau)),
                falling * (1 + loss_times * residual.loss),
                grad_norm * math.exp(residual.grad_norm),
            )
