"""A small robust least-squares fit of positive constants: Gauss-Newton on logarithms, a prior, and Huber's weights.

Written here because the base install has neither numpy nor scipy, and ten constants do not need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigsci_launch.plan.price.neighbours import invert_positive_definite

Residuals = Callable[[Sequence[float]], list[float]]

NOISES = (0.02, 0.03, 0.045, 0.07, 0.1, 0.15, 0.22)
"""Relative errors of rows to choose from, against which the prior is weighed: from twice the difference of repeated
measurements to that of programs which the model does not tell apart. An error above it counts less (Huber)."""

_STEP, _LONGEST_MOVE, _SMALLEST_MOVE = 1e-4, 0.7, 1e-4


@dataclass(frozen=True, slots=True)
class Prior:
    """Expected value of a constant, the standard deviation of its logarithm, and its least and its largest value."""

    value: float
    spread: float
    least: float = 0.0
    most: float = math.inf

    @property
    def range(self) -> tuple[float, float]:
        """Least and most move from `value`, as logarithms."""
        return math.log(self.least / self.value) if self.least else -math.inf, math.log(self.most / self.value)


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted values, the standard deviation of each logarithm, and the noise that makes the rows most likely."""

    values: tuple[float, ...]
    spreads: tuple[float, ...]
    noise: float


def fit_constants(
    residuals: Residuals,
    priors: Sequence[Prior],
    start: Sequence[float] | None = None,
    num_iterations: int = 20,
    noises: Sequence[float] = NOISES,
) -> Fit:
    """Return values that make `residuals` (logarithms of predicted over measured) small and stay close to the priors.

    How much the rows may err is found too: a few rows of unlike programs then move the constants less than as many of
    one program.

    Args:
        residuals: residuals at given values of the constants; the same number on every call.
        priors: one for each constant.
        start: values to start from; default: the priors'.
        num_iterations: the largest number of moves.
        noises: the relative errors of rows to choose from.
    """
    best, most = None, -math.inf
    moves = [math.log(value / prior.value) for value, prior in zip(start or _values(priors), priors, strict=True)]
    for noise in noises:
        moves = _minimise(residuals, priors, moves, num_iterations, noise)
        errors, slopes = _linearise(residuals, priors, moves)
        normal, _ = _normal_equations(errors, slopes, priors, moves, noise)
        evidence = _log_evidence(errors, moves, priors, normal, noise)
        if evidence > most:
            best, most = Fit(tuple(_moved(priors, moves)), _spreads(errors, normal, noise), noise), evidence
    assert best is not None, "no noise to choose from"
    return best


def _minimise(
    residuals: Residuals, priors: Sequence[Prior], start: list[float], num_iterations: int, noise: float
) -> list[float]:
    """Return the moves of least cost, by Gauss-Newton."""
    moves = start
    for _ in range(num_iterations):
        errors, slopes = _linearise(residuals, priors, moves)
        normal, gradient = _normal_equations(errors, slopes, priors, moves, noise)
        before, moves = moves, _next_moves(normal, gradient, moves, priors)
        if max(abs(move - other) for move, other in zip(moves, before, strict=True)) < _SMALLEST_MOVE:
            break
    return moves


def _next_moves(
    normal: list[list[float]], gradient: list[float], moves: list[float], priors: Sequence[Prior]
) -> list[float]:
    """Return the moves after one step. A constant at its least or most that would go beyond stays there."""
    free = list(range(len(moves)))
    while free:
        inverse = invert_positive_definite([[normal[row][column] for column in free] for row in free])
        slopes, found = [gradient[index] for index in free], list(moves)
        for row, index in zip(inverse, free, strict=True):
            change = -sum(map(float.__mul__, row, slopes))
            low, high = priors[index].range
            found[index] = max(low, min(high, moves[index] + max(-_LONGEST_MOVE, min(_LONGEST_MOVE, change))))
        stopped = [index for index in free if found[index] == moves[index] and moves[index] in priors[index].range]
        if not stopped:
            return found
        free = [index for index in free if index not in stopped]
    return moves


def _spreads(errors: Sequence[float], normal: list[list[float]], noise: float) -> tuple[float, ...]:
    inverse = invert_positive_definite(normal)
    scale = max(1.0, _median([abs(error) for error in errors]) / (0.6745 * noise)) if errors else 1.0
    return tuple(math.sqrt(inverse[index][index]) * scale for index in range(len(normal)))


def _log_evidence(
    errors: Sequence[float], moves: Sequence[float], priors: Sequence[Prior], normal: list[list[float]], noise: float
) -> float:
    """Return how likely the rows are with this noise, whatever the constants: Laplace's approximation, up to a constant
    (MacKay 1992)."""
    volume = _log_determinant(normal) + sum(2 * math.log(prior.spread) for prior in priors)
    return -(_robust_cost(errors, moves, priors, noise) + volume) / 2 - len(errors) * math.log(noise)


def _log_determinant(matrix: list[list[float]]) -> float:
    """Return the logarithm of the determinant of a symmetric positive definite matrix."""
    rows, total = [list(row) for row in matrix], 0.0
    for pivot, row in enumerate(rows):
        total += math.log(row[pivot])
        for other in rows[pivot + 1 :]:
            factor = other[pivot] / row[pivot]
            other[pivot:] = [value - factor * above for value, above in zip(other[pivot:], row[pivot:], strict=True)]
    return total


def _robust_cost(errors: Sequence[float], moves: Sequence[float], priors: Sequence[Prior], noise: float) -> float:
    """Return Huber's cost of the errors plus the prior's cost of the moves, in squared standard deviations."""
    measured = sum(
        (error * error if abs(error) <= noise else 2 * noise * abs(error) - noise**2) / noise**2 for error in errors
    )
    return measured + sum((move / prior.spread) ** 2 for move, prior in zip(moves, priors, strict=True))


def _values(priors: Sequence[Prior]) -> list[float]:
    return [prior.value for prior in priors]


def _moved(priors: Sequence[Prior], moves: Sequence[float]) -> list[float]:
    return [prior.value * math.exp(move) for prior, move in zip(priors, moves, strict=True)]


def _linearise(
    residuals: Residuals, priors: Sequence[Prior], moves: list[float]
) -> tuple[list[float], list[list[float]]]:
    """Return the residuals at `moves`, and their slopes along each constant's logarithm."""
    errors = residuals(_moved(priors, moves))
    slopes = []
    for index in range(len(moves)):
        beside = [*moves[:index], moves[index] + _STEP, *moves[index + 1 :]]
        slopes.append([(b - a) / _STEP for a, b in zip(errors, residuals(_moved(priors, beside)), strict=True)])
    return errors, slopes


def _normal_equations(
    errors: list[float], slopes: list[list[float]], priors: Sequence[Prior], moves: list[float], noise: float
) -> tuple[list[list[float]], list[float]]:
    weights = [min(1.0, noise / max(abs(error), 1e-12)) / noise**2 for error in errors]
    weighted = [[slope * weight for slope, weight in zip(row, weights, strict=True)] for row in slopes]
    normal = [[sum(map(float.__mul__, one, other)) for other in slopes] for one in weighted]
    gradient = [sum(map(float.__mul__, row, errors)) for row in weighted]
    for index, prior in enumerate(priors):
        normal[index][index] += 1 / prior.spread**2
        gradient[index] += moves[index] / prior.spread**2
    return normal, gradient


def _median(numbers: Sequence[float]) -> float:
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
