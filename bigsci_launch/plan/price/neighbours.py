"""What measured neighbours know and the model does not: which kernels a library picks for which shapes, for one.

The model's relative error is interpolated between measured setups (kriging with an exponential kernel and a nugget), so
a plan beside measured ones takes over their error and a plan far from all of them keeps the model's own figure. Nothing
is fitted here: scales and nugget are fixed, the same for every cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bigsci_launch.plan.shape.setup import Setup

Point = tuple[float, ...]

# Distance of one unit: for tp, micro batch, pp, dp, hidden size, heads and layers and batch a factor of two to the
# power of the scale; for alignment of heads a change; for days that many.
TIME_SCALES = (0.3, 1.5, 1.5, 1.5, 0.3, 1.5, 1.0, 15.0, 6.0, 6.0)
MEMORY_SCALES = (1.0, 1.5, 1.5, 1.5, 0.5, 3.0, 10.0, 30.0, 6.0, 6.0)
DAY_AXIS = 7
TIME_NUGGET = 0.04
MEMORY_NUGGET = 0.36


def point_of(setup: Setup) -> Point:
    """Where a setup lies among others. A day that is not given is at no distance from any."""
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
    )


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Measured setups with their weights in the interpolation. No points: no correction."""

    points: tuple[Point, ...] = ()
    weights: tuple[float, ...] = ()
    scales: Point = TIME_SCALES

    def look_up(self, point: Point) -> tuple[float, float]:
        """The factor on the model's figure at `point`, and how close the nearest neighbour is: 1 the same, 0 far."""
        if not self.points:
            return 1.0, 0.0
        kernel = kernel_row(point, self.points, self.scales)
        return math.exp(sum(map(float.__mul__, kernel, self.weights))), max(kernel)


def kernel_row(point: Point, points: Sequence[Point], scales: Point) -> list[float]:
    """How alike `point` is to each of `points`, 0 to 1."""
    inverse = [1 / scale for scale in scales]  # an infinite scale ignores its axis
    return [math.exp(-math.sqrt(_squared_distance(point, other, inverse))) for other in points]


def _squared_distance(one: Point, other: Point, inverse: list[float]) -> float:
    # Days may be infinite (not given): they are at no distance then.
    return sum(
        ((a - b) * c) ** 2
        for a, b, c in zip(one, other, inverse, strict=True)
        if a != b and math.isfinite(a) and math.isfinite(b)
    )


def invert_kernel(points: Sequence[Point], scales: Point, nugget: float) -> list[list[float]]:
    """The inverse of the kernel matrix of `points` with `nugget` on its diagonal, row by row."""
    matrix = [kernel_row(point, points, scales) for point in points]
    for index, row in enumerate(matrix):
        row[index] += nugget
    return invert_positive_definite(matrix)


def interpolate(
    points: Sequence[Point], residuals: Sequence[float], inverse: list[list[float]], scales: Point
) -> Neighbours:
    """Neighbours whose correction reproduces `residuals` (logarithms of measured over modelled) as far as the nugget
    lets it."""
    weights = tuple(sum(map(float.__mul__, row, residuals)) for row in inverse)
    return Neighbours(tuple(points), weights, scales)


def leave_one_out(residuals: Sequence[float], inverse: list[list[float]]) -> list[float]:
    """What the others would have interpolated for each point without its own residual (Dubrule 1983)."""
    return [
        residual - sum(map(float.__mul__, row, residuals)) / row[index]
        for index, (residual, row) in enumerate(zip(residuals, inverse, strict=True))
    ]


def invert_positive_definite(matrix: list[list[float]]) -> list[list[float]]:
    """The inverse of a symmetric positive definite matrix, by Gauss-Jordan elimination in its own order."""
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
