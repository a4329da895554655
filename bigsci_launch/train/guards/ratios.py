"""Quotients and powers of numbers that may be zero, infinite or not a number: a guard that meets one must not crash."""

from __future__ import annotations

import math


def ratio(part: float, whole: float) -> float:
    """Return how many times `whole` goes into `part`: infinite for x over 0, NaN for 0 over 0.

    NaN passes no limit. What must not be hidden is compared with `is_within`.
    """
    if whole:
        return part / whole
    return math.nan if part == 0 or math.isnan(part) else math.copysign(math.inf, part)


def power(base: float, exponent: float) -> float:
    """Return `base` to the `exponent`, infinite where the result is too large for a float or is one over zero."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.inf if base == 0 else math.nan


def root(square: float) -> float:
    """Return the square root, NaN for what is negative or no number."""
    return math.sqrt(square) if square >= 0 else math.nan


def is_within(apart: float, limit: float) -> bool:
    """Return whether a difference is within a limit: one that is infinite or not a number is within none."""
    return math.isfinite(apart) and apart <= limit
