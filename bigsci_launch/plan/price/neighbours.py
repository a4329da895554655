"""Corrects the model by measured neighbours, which reflect what it does not know, such as a library's choice of
kernels.

The model's relative error is interpolated between measured setups (kriging with an exponential kernel and a nugget). A
plan close to measured ones gets their error, and a plan far from all of them keeps the model's own figure. Nothing is
fitted here: scales and nugget are the same for every cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bigsci_launch.plan.shape.setup import Setup

Point = tuple[float, ...]

# What counts as distance one. For tp, micro batch, pp, dp, hidden size, heads, layers and batch: a factor of two to the
# power of the scale. For the alignment of heads and for days: a difference of the scale.
TIME_SCALES = (0.3, 1.5, 1.5, 1.5, 0.3, 1.5, 1.0, 15.0, 6.0, 6.0, 1.5, 0.5, 1.0, 1.0, 0.3)
MEMORY_SCALES = (1.0, 1.5, 1.5, 1.5, 0.5, 3.0, 10.0, 30.0, 6.0, 6.0, 1.5, 1.0, 0.5, 1.0, 0.3)
DAY_AXIS = 7
TIME_NUGGET = 0.04
MEMORY_NUGGET = 0.36


def point_of(setup: Setup) -> Point:
    """Return the position of a setup among others. A missing day has distance zero to every day."""
    shape, topology = setup.shape, setup.topology
    return (
        math.log2(topology.tp),
        math.log2(setup.micro_batch_size),
        math.log2(topology.pp),
        math.log2(topology.dp),
        math.log2(shape.hidden_size),
        math.log2(shape.num_attention_heads),
        0.0 if shape.head_dim % 8 == 0 else 1.0,
        float(setup.day.toordinal()) if setup.day else math.inf,
        math.log2(shape.num_layers),
        math.log2(setup.global_batch_size),
        math.log2(shape.sequence_length),
        float(setup.precision == "fp8"),
        setup.num_passes,
        math.log2(topology["cp"]),
        float(shape.experts is not None),
    )


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Measured setups with their weights in the interpolation. Without points there is no correction."""

    points: tuple[Point, ...] = ()
    weights: tuple[float, ...] = ()
    scales: Point = TIME_SCALES

    def look_up(self, point: Point) -> tuple[float, float]:
        """Return the factor on the model's figure at `point`, and the closeness of the nearest neighbour: 1 same, 0
        far."""
        if not self.points:
            return 1.0, 0.0
        kernel = kernel_row(point, self.points, self.scales)
        return math.exp(sum(map(float.__mul__, kernel, self.weights))), max(kernel)


def kernel_row(point: Point, points: Sequence[Point], scales: Point) -> list[float]:
    """Return the similarity of `point` to each of `points`, 0 to 1."""
    inverse = [1 / scale for scale in scales]  # an infinite scale ignores its axis
    return [math.exp(-math.sqrt(_squared_distance(point, other, inverse))) for other in points]


def _squared_distance(one: Point, other: Point, inverse: list[float]) -> float:
    # A missing day is infinite, and has distance zero.
    return sum(
        ((a - b) * c) ** 2
        for a, b, c in zip(one, other, inverse, strict=True)
        if a != b and math.isfinite(a) and math.isfinite(b)
    )


def invert_kernel(points: Sequence[Point], scales: Point, nugget: float) -> list[list[float]]:
    """Return the inverse of the kernel matrix of `points` with `nugget` on its diagonal, row by row."""
    matrix = [kernel_row(point, points, scales) for point in points]
    for index, row in enumerate(matrix):
        row[index] += nugget
    return invert_positive_definite(matrix)


def interpolate(
    points: Sequence[Point], residuals: Sequence[float], inverse: list[list[float]], scales: Point
) -> Neighbours:
    """Return neighbours whose correction reproduces `residuals` (logarithms of measured over modelled) as far as the
    nugget allows."""
    weights = tuple(sum(map(float.__mul__, row, residuals)) for row in inverse)
    return Neighbours(tuple(points), weights, scales)


def leave_one_out(residuals: Sequence[float], inverse: list[list[float]]) -> list[float]:
    """Return what the other points would interpolate for each point without its own residual (Dubrule 1983)."""
    return [
        residual - sum(map(float.__mul__, row, residuals)) / row[index]
        for index, (residual, row) in enumerate(zip(residuals, inverse, strict=True))
    ]


def invert_positive_definite(matrix: list[list[float]]) -> list[list[float]]:
    """Return the inverse of a symmetric positive definite matrix, by Gauss-Jordan elimination without pivoting."""
    size = len(matrix)
    rows = [[*row, *(1.0 if i == j else 0.0 for j in range(size))] for i, row in enumerate(matrix)]
    for pivot in range(size):
        scale = 1 / rows[pivot][pivot]
        pivot_row = rows[pivot] = [value * scale for value in rows[pivot]]
        for index, row in enumerate(rows):
            factor = row[pivot]
            if index != pivot and factor:
                rows[index] = [value - factor * other for value, other in zip(row, pivot_row, strict=True)]
    return [row[size:] for row in rows]
