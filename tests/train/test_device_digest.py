"""The digest that a GPU can compute: its definition in plain integers, and what it detects."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from bigsci_launch.train.device import digest  # noqa: E402
from bigsci_launch.train.device.digest import BLOCK_WORDS, digests_on_device, mix  # noqa: E402


def defined(data: bytes) -> int:
    """Return the digest of bytes by the definition in the module's docstring."""
    padded = data + bytes(-len(data) % 4)
    words = [int.from_bytes(padded[at : at + 4], "little", signed=True) for at in range(0, len(padded), 4)]
    total = len(data)
    for index, word in enumerate(words):
        block, place = divmod(index, BLOCK_WORDS)
        total += (mix(~block & (2**64 - 1)) | 1) * (mix(place) | 1) * word
    value = mix(total % 2**64)
    return value - 2**64 if value >> 63 else value


def one(tensor: Any) -> int:
    return digests_on_device([tensor])[0]


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).reshape(-1).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 1000, 1003])
def test_the_value_is_defined_by_the_bytes(dtype: Any, size: int) -> None:
    torch.manual_seed(size)
    tensor = (100 * torch.randn(size).abs()).to(dtype)
    assert one(tensor) == defined(bytes_of(tensor))


def test_blocks_take_part_with_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK_WORDS", 64)
    digest._keys.cache_clear()
    tensor = torch.randn(200)
    swapped = torch.cat([tensor[64:128], tensor[:64], tensor[128:]])
    try:
        assert len({one(tensor), one(swapped), one(torch.cat([tensor[:128], tensor[128:].flip(0)]))}) == 3
    finally:
        digest._keys.cache_clear()


def test_views_and_shapes_do_not_matter_but_length_and_order_do() -> None:
    tensor = torch.randn(12, 7).to(torch.bfloat16)
    assert one(tensor) == one(tensor.reshape(-1)) == one(tensor.t().contiguous().t())
    assert one(tensor.reshape(-1)[1:]) == one(tensor.reshape(-1)[1:].clone())
    assert one(tensor) != one(tensor.t())
    assert len({one(torch.zeros(size)) for size in range(1, 50)}) == 49


def test_every_flipped_bit_is_seen() -> None:
    tensor = torch.randn(50).to(torch.bfloat16)
    bits, seen = tensor.view(torch.int16), {one(tensor)}
    for index in range(50):
        for bit in range(16):
            mask = 1 << bit if bit < 15 else -(1 << 15)
            bits[index] ^= mask
            seen.add(one(tensor))
            bits[index] ^= mask
    assert len(seen) == 1 + 50 * 16
    assert digests_on_device([]) == []


def test_many_are_those_of_each() -> None:
    tensors = [torch.randn(3, 4), torch.randn(5).to(torch.bfloat16), torch.zeros(2)]
    assert digests_on_device(tensors) == [one(tensor) for tensor in tensors]
