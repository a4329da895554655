"""Untrained positions that attention computes: rotary and alibi.

They have no parameters and no buffers, so checkpoints do not contain them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

_BASE = 10_000.0


class RotaryPositions(nn.Module):
    """Rotates pairs of a head's elements by angles that grow with the position (Su et al., arXiv 2104.09864).

    Element i is paired with element i + head_dim / 2, as in GPT-NeoX. Angles are fp32 in every precision.
    """

    def forward(self, heads: Tensor) -> Tensor:
        """Queries or keys, (batch, heads, length, head_dim) -> the same."""
        cosines, sines = _angles(heads.shape[-2], heads.shape[-1], heads.device)
        first, second = heads.float().chunk(2, dim=-1)
        turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
        return turned.to(heads.dtype)


@lru_cache(maxsize=8)
def _angles(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (length, head_dim / 2) each."""
    speeds = _BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), speeds)
    return angles.cos().float().to(device), angles.sin().float().to(device)


class AlibiPositions(nn.Module):
    """Lowers each score by the distance times the head's slope (Press et al., arXiv 2108.12409)."""

    def __init__(self, num_heads: int, part: slice) -> None:
        super().__init__()
        self.slopes = alibi_slopes(num_heads)[part]

    def forward(self, queries: Tensor) -> Tensor:
        """Queries (batch, heads, length, head_dim) -> biases to add to the scores, (heads, length, length).

        They are minus infinity where a key comes after its query.
        """
        return _biases(tuple(self.slopes), queries.shape[-2], queries.dtype, queries.device)


@lru_cache(maxsize=8)
def _biases(slopes: tuple[float, ...], length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    places = torch.arange(length, device=device)
    distances = places - places.unsqueeze(-1)
    biases = torch.tensor(slopes, device=device).view(-1, 1, 1) * distances
    return biases.masked_fill(distances > 0, -math.inf).to(dtype)


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of every head: 2^(-8/n), 2^(-16/n)... for n heads.

    If n is not a power of two, take the slopes of the next lower power, then every other slope of the next higher one.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + between[: num_heads - power]
