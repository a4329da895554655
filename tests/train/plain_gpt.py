"""A GPT in plain PyTorch, written from the papers: nothing of the trainer's layers, only tensors by name.

Grouped-query attention (Ainslie et al., arXiv 2305.13245), SwiGLU (Shazeer, arXiv 2002.05202), RMSNorm (Zhang and
Sennrich, arXiv 1910.07467), rotary positions (Su et al., arXiv 2104.09864).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def plain_loss(model: Any, weights: Weights, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of `model`, a section of a run file, on tokens and labels (batch, length).

    `weights` has `embedding`, `positions` (if learned), `head`, `final.*`, and `0.attention_norm.weight` and so on.
    """
    x = weights["embedding"][tokens]
    if model.positions == "learned":
        x = x + weights["positions"][: tokens.shape[1]]
    for layer in range(model.num_layers):
        part = {name.partition(".")[2]: each for name, each in weights.items() if name.startswith(f"{layer}.")}
        x = x + attend(model, part, norm(model, part, "attention_norm", x))
        x = x + mlp(model, part, norm(model, part, "mlp_norm", x))
    logits = norm(model, weights, "final", x) @ weights["head"][: model.vocab_size].T
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    losses: Tensor = logits.exp().sum(-1).log() - chosen
    return losses.mean()


def norm(model: Any, weights: Weights, name: str, x: Tensor) -> Tensor:
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    scaled: Tensor = x / (x.square().mean(-1, keepdim=True) + model.layernorm_epsilon).sqrt()
    return scaled * weights[f"{name}.weight"] + bias(weights, name)


def bias(weights: Weights, name: str) -> Tensor:
    return weights.get(f"{name}.bias", torch.zeros(()))


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + bias(weights, name)


def attend(model: Any, weights: Weights, x: Tensor) -> Tensor:
    """One head after another; the rows of its query, key and value are looked up in the stored matrix."""
    heads, width = model.num_attention_heads, model.hidden_size // model.num_attention_heads
    group = heads // (model.num_key_value_heads or heads)
    stored = linear(weights, "attention.qkv", x)
    found = []
    for head in range(heads):
        first = head // group * (group + 2)
        at = (first + head % group, first + group, first + group + 1)
        query, key, value = (stored[..., each * width : (each + 1) * width] for each in at)
        if model.positions == "rotary":
            query, key = rotated(query), rotated(key)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        found.append(scores.masked_fill(later, -math.inf).softmax(-1) @ value)
    return linear(weights, "attention.output", torch.cat(found, -1))


def rotated(x: Tensor) -> Tensor:
    """Multiply pairs (i, i + width / 2), as complex numbers, by a rotation that grows with the position."""
    length, width = x.shape[-2:]
    speeds = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), speeds)
    first, second = x[..., : width // 2], x[..., width // 2 :]
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], -1)


def mlp(model: Any, weights: Weights, x: Tensor) -> Tensor:
    wide = linear(weights, "mlp.up", x)
    if model.activation == "swiglu":
        gate, value = wide[..., 0::2], wide[..., 1::2]
        wide = gate / (1 + (-gate).exp()) * value
    else:
        wide = wide * (1 + torch.erf(wide / math.sqrt(2))) / 2
    return linear(weights, "mlp.down", wide)
