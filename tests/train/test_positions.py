"""Rotary and alibi positions, compared with their papers."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from bigsci_launch.train.parallel.initial_weights import Draw  # noqa: E402
from bigsci_launch.train.parallel.model import GptSizes, SelfAttention  # noqa: E402
from bigsci_launch.train.parallel.positions import alibi_biases, alibi_slopes, rotary_angles, rotate  # noqa: E402
from bigsci_launch.train.parallel.tensor import TensorParallel  # noqa: E402

ALONE = TensorParallel(0, 1, None)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 12, 8)
    angles = rotary_angles(12, 8, query.device)
    turned = rotate(query, *angles)[0, 0].double() @ rotate(key, *angles)[0, 0].double().T
    for distance in range(-11, 12):
        along = turned.diagonal(distance)
        assert along.tolist() == pytest.approx([float(along[0])] * len(along), abs=1e-5)
    assert turned[0, 0] == pytest.approx(float(query[0, 0, 0] @ key[0, 0, 0]), abs=1e-5)
    assert abs(turned[0, 0] - turned[5, 0]) > 1e-2


def test_rotary_turns_by_the_published_angles() -> None:
    heads = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 1, 3, 4)
    turned = rotate(heads, *rotary_angles(3, 4, heads.device))[0, 0, 2]
    expected = [math.cos(2), math.cos(0.02), math.sin(2), math.sin(0.02)]
    assert turned.tolist() == pytest.approx(expected, abs=1e-6)


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8) == [2**-power for power in range(1, 9)]
    assert alibi_slopes(1) == [2**-8]
    assert alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


def test_alibi_lowers_scores_by_distance_and_hides_what_comes_after() -> None:
    biases = alibi_biases(tuple(alibi_slopes(8)[2:4]), 3, torch.float32, torch.device("cpu"))
    assert biases.shape == (2, 3, 3)
    assert biases[0].tolist() == [[0, -math.inf, -math.inf], [-1 / 8, 0, -math.inf], [-2 / 8, -1 / 8, 0]]
    assert biases[1, 2, 0] == -2 / 16


@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_attention_looks_back_only_and_holds_no_more_weights(positions: str) -> None:
    sizes = GptSizes(
        num_layers=1,
        hidden=16,
        heads=4,
        ffn_hidden=64,
        length=8,
        vocab=300,
        padded_vocab_size=512,
        dropout=0.0,
        epsilon=1e-5,
        std=0.5,
        positions=positions,
    )
    layer = SelfAttention(sizes, Draw(1, "attention"), ALONE)
    assert set(layer.state_dict()) == {"qkv.weight", "qkv.bias", "output.weight", "output.bias"}
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[0, 5] += 1

    def attention(x: Any) -> Any:
        return layer(x, layer.tables(x))

    before, after = attention(x), attention(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])
    # The same token everywhere: without positions, every place would have the same output.
    alike = attention(x[:, :1].expand(1, 8, 16))
    swapped = attention(x.flip(1))[0, -1]
    assert torch.allclose(alike[0, 0], alike[0, 7])
    assert not torch.allclose(swapped, before[0, -1])
