"""Picks elements of a tensor to compare, where comparing all of them would cost too much."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bigsci_launch.train.device.gpu import send
from bigsci_launch.train.guards.ratios import ratio

VECTORS = 8


def spread(size: int, count: int) -> list[int]:
    """Return at most `count` positions, spread evenly over `size` elements."""
    step = max(1, math.ceil(size / count))
    return list(range(step // 2, size, step)) or [0] * bool(size)


def signs(size: int, like: Tensor, salt: int) -> Tensor:
    """Return fixed vectors of -1 and +1, shape (size, VECTORS), of the dtype and device of `like`; draws no random
    number of the run.

    One vector can be almost orthogonal to the only direction in which a gradient is large; what is left of it then is
    rounding. That was seen in 2 of 97 weights of a healthy run. Several vectors are not.
    """
    generator = torch.Generator().manual_seed(salt)
    drawn = torch.randint(0, 2, (size, VECTORS), generator=generator) * 2 - 1
    return send(drawn.to(like.dtype), like.device)


def distance(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return how far `found` is from `expected`, relative to its size, and the factor between them.

    Both are NaN, which exceeds no limit, if a number is not finite, such as at an overflow of 16 bits: the optimizer
    skips that step, and numbers that are not finite have a check of their own.
    """
    return distance_of(*compare(found, expected).tolist())


def compare(found: Tensor, expected: Tensor) -> Tensor:
    """Return what `distance_of` takes, in a tensor on the device: so the distances of many can be read at once."""
    is_finite = found.isfinite().all() & expected.isfinite().all()
    product = found.flatten() @ expected.flatten()
    return torch.stack([is_finite.to(product.dtype), expected.norm(), (found - expected).norm(), product])


def distance_of(is_finite: float, size: float, apart: float, product: float) -> tuple[float, float]:
    """Return the distance for the sizes of what was expected and of the difference, and the product with what was
    found."""
    if not is_finite:
        return math.nan, math.nan
    if not size:
        return (math.inf if apart > 1e-9 else 0.0), math.inf
    return ratio(apart, size), ratio(product, size * size)
