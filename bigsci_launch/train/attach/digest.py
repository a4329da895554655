"""A 64-bit digest of a tensor, computed where the tensor is and with whole numbers only: every device gives the same.

Elements are read as whole numbers, each multiplied by its own odd random number, and summed modulo 2**64. An odd factor
loses nothing, so a single element that differs always changes the digest; several do with certainty but for 2**-60.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_CHUNK = 1 << 18
_BETWEEN_CHUNKS = 0x5851F42D4C957F2D
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest_here(tensor: Tensor) -> Tensor:
    """Return the digest as a 64-bit scalar on the tensor's device; nothing waits for the device."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().contiguous().reshape(-1).view(_BITS[plain.element_size()])
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    factors = _factors(flat.device)
    for part in torch.split(flat, _CHUNK):
        total = total * _BETWEEN_CHUNKS + (part.to(torch.int64) * factors[: part.numel()]).sum()
    return total


def digests_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the digests of tensors as signed 64-bit integers; waits for the device once."""
    if not tensors:
        return []
    found: list[int] = torch.stack([digest_here(tensor) for tensor in tensors]).tolist()
    return found


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(12)
    numbers = torch.randint(-(2**63), 2**63 - 1, (_CHUNK,), dtype=torch.int64, generator=generator)
    return (numbers | 1).to(device)
