"""A small robust least-squares fit of positive constants: Gauss-Newton on logarithms, a prior, and Huber's weights.

Written here because the base install has neither numpy nor scipy, and ten constants do not need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigsci_launch.plan.price.neighbours import invert_positive_definite

Residuals = Callable[[Sequence[float]], list[float]]

HUBER = 0.02
"""Relative error above which a row counts less: twice the difference of repeated measurements."""

NOISE = 0.02
"""Relative error against which the prior is weighed."""

_STEP, _LONGEST_MOVE, _SMALLEST_MOVE = 1e-4, 0.7, 1e-4


@dataclass(frozen=True, slots=True)
class Prior:
    """Expected value of a constant, and the standard deviation of its logarithm."""

    value: float
    spread: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted values, the standard deviation of each logarithm, and the final cost."""

    values: tuple[float, ...]
    spreads: tuple[float, ...]
    cost: float


def fit_constants(
    residuals: Residuals, priors: Sequence[Prior], start: Sequence[float] | None = None, num_iterations: int = 20
) -> Fit:
    """Return values that make `residuals` (logarithms of predicted over measured) small and stay close to the priors.

    Args:
        residuals: residuals at given values of the constants; the same number on every call.
        priors: one for each constant.
        start: values to start from; default: the priors'.
        num_iterations: the largest number of moves.
    """
    moves = [math.log(value / prior.value) for value, prior in zip(start or _values(priors), priors, strict=True)]
    normal: list[list[float]] = []
    for _ in range(num_iterations):
        errors, slopes = _linearise(residuals, priors, moves)
        normal, gradient = _normal_equations(errors, slopes, priors, moves)
        change = [-sum(map(float.__mul__, row, gradient)) for row in invert_positive_definite(normal)]
        change = [max(-_LONGEST_MOVE, min(_LONGEST_MOVE, move)) for move in change]
        moves = [move + more for move, more in zip(moves, change, strict=True)]
        if max(map(abs, change)) < _SMALLEST_MOVE:
            break
    errors = residuals(_moved(priors, moves))
    inverse = invert_positive_definite(normal)
    scale = max(1.0, _median([abs(error) for error in errors]) / (0.6745 * NOISE)) if errors else 1.0
    spreads = tuple(math.sqrt(inverse[index][index]) * scale for index in range(len(priors)))
    return Fit(tuple(_moved(priors, moves)), spreads, robust_cost(errors, moves, priors))


def robust_cost(errors: Sequence[float], moves: Sequence[float], priors: Sequence[Prior]) -> float:
    """Return Huber's cost of the errors plus the prior's cost of the moves, in squared standard deviations."""
    measured = sum(
        (error * error if abs(error) <= HUBER else 2 * HUBER * abs(error) - HUBER**2) / NOISE**2 for error in errors
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
    errors: list[float], slopes: list[list[float]], priors: Sequence[Prior], moves: list[float]
) -> tuple[list[list[float]], list[float]]:
    weights = [min(1.0, HUBER / max(abs(error), 1e-12)) / NOISE**2 for error in errors]
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
