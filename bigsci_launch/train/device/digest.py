"""A 64-bit digest of a tensor that is computed where the tensor is, in integer operations that wrap around.

The value is the same on every device. It detects damage, not attacks: a word that changes always changes it, because
every word is multiplied by an odd number of its own; other changes keep it with a probability of about 2^-32 or less.

    digest = mix(number of bytes + sum over blocks b of K[b] x (sum over words i of k[i] x word[b, i]))   (mod 2^64)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

BLOCK_WORDS = 1 << 20
"""Words of 32 bits per block. Part of the definition; the 64-bit copy of a block fits in a GPU's cache."""

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Return splitmix64's output for a state, both from 0 to 2^64 - 1."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def digests_on_device(tensors: Sequence[Tensor]) -> list[int]:
    """Return the digests of tensors as signed 64-bit integers; waits for the device once."""
    if not tensors:
        return []
    sums = torch.stack([_block_sum(tensor) for tensor in tensors]).tolist()
    return [
        signed(mix((total + tensor.numel() * tensor.element_size()) & _MASK))
        for total, tensor in zip(sums, tensors, strict=True)
    ]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor as bytes, in row-major order."""
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def digests64(tensors: Sequence[Tensor]) -> list[int]:
    """Return digests as signed 64-bit integers: others on a GPU than the faster ones of a CPU."""
    if all(tensor.is_cuda for tensor in tensors):
        return digests_on_device(tensors)
    return [digest64(tensor) for tensor in tensors]


def digest64(tensor: Tensor) -> int:
    """Return a digest of `tensor` as a signed 64-bit integer; another one on a GPU than on a CPU."""
    return digests_on_device([tensor])[0] if tensor.is_cuda else signed(xxh3_64_intdigest(bytes_of(tensor)))


def _block_sum(tensor: Tensor) -> Tensor:
    """Return the sum over the blocks, a scalar on the tensor's device."""
    words = _words(tensor)
    keys = _keys(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, start in enumerate(range(0, len(words), BLOCK_WORDS)):
        block = words[start : start + BLOCK_WORDS].to(torch.int64)
        total += block.mul_(keys[: len(block)]).sum() * signed(mix(~number & _MASK) | 1)
    return total


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order as 32-bit words; zeros fill up the last one."""
    flat = tensor.detach().contiguous().reshape(-1)
    num_bytes = flat.numel() * flat.element_size()
    if num_bytes % 4 == 0 and flat.data_ptr() % 4 == 0:
        return flat.view(torch.int32)
    padded = torch.zeros(-(-num_bytes // 4) * 4, dtype=torch.uint8, device=flat.device)
    padded[:num_bytes] = flat.view(torch.uint8)
    return padded.view(torch.int32)


@lru_cache(maxsize=2)
def _keys(device: torch.device) -> Tensor:
    """Return the odd numbers of the words of a block: those that splitmix64 gives for 0, 1, 2, ..."""
    value = torch.arange(BLOCK_WORDS, dtype=torch.int64, device=device) + signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ _shifted(value, shift)) * signed(factor)
    return (value ^ _shifted(value, 31)) | 1


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros; torch's own shift repeats the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """Return an unsigned 64-bit integer as the signed one with the same bits."""
    return value - (1 << 64) if value >> 63 else value
