"""Untrained positions that attention computes: rotary and alibi.

They have no parameters and no buffers, so checkpoints do not contain them. What depends on the length alone is computed
once and kept: compiled layers take it as an input.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_BASE = 10_000.0
_BLOCK, _NARROWEST = 128, 16

Tables = tuple[Any, ...]
"""What attention needs for its positions, apart from queries, keys and values."""


@lru_cache(maxsize=8)
def rotary_angles(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (length, head_dim / 2) each. They are fp32 in every precision."""
    speeds = _BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), speeds)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate pairs of a head's elements by angles that grow with the position (Su et al., arXiv 2104.09864): queries or
    keys, (batch, heads, length, head_dim) -> the same.

    Element i is paired with element i + head_dim / 2, as in GPT-NeoX.
    """
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return turned.to(heads.dtype)


@lru_cache(maxsize=8)
def alibi_biases(slopes: tuple[float, ...], length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what alibi adds to the scores, (heads, length, length): each is lowered by the distance times the head's
    slope (Press et al., arXiv 2108.12409). They are minus infinity where a key comes after its query."""
    places = torch.arange(length, device=device)
    distances = places - places.unsqueeze(-1)
    biases = torch.tensor(slopes, device=device).view(-1, 1, 1) * distances
    return biases.masked_fill(distances > 0, -math.inf).to(dtype)


@lru_cache(maxsize=8)
def alibi_blocks(slopes: tuple[float, ...], length: int, device: torch.device) -> Tables:
    """Return what compiled attention needs for alibi instead of biases: the slopes, and which blocks of scores it
    computes. `length` is a multiple of 128."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.tensor(slopes, device=device), create_block_mask(_looks_back, None, None, length, length, str(device))


def has_blocks(length: int, head_dim: int, device: torch.device) -> bool:
    """Whether attention with alibi can be compiled: torch has such a kernel for GPUs, with its backward pass."""
    return device.type == "cuda" and length % _BLOCK == 0 and head_dim >= _NARROWEST


def is_in_blocks(tables: Tables) -> bool:
    """Whether `tables` are those of `alibi_blocks`."""
    return len(tables) == 2


def _looks_back(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, blocks: Any, *, is_shared: bool
) -> Tensor:
    """Return causal attention with alibi, without a matrix of biases: each score is lowered where it is computed."""
    from torch.nn.attention.flex_attention import flex_attention

    def lowered(score: Tensor, _batch: Tensor, head: Tensor, place: Tensor, earlier: Tensor) -> Tensor:
        return score + slopes[head] * (earlier - place)

    result = flex_attention(query, key, value, score_mod=lowered, block_mask=blocks, enable_gqa=is_shared)
    assert isinstance(result, Tensor)
    return result


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of every head: 2^(-8/n), 2^(-16/n)... for n heads.

    If n is not a power of two, take the slopes of the next lower power, then every other slope of the next higher one.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + between[: num_heads - power]
