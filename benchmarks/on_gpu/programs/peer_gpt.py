"""The GPT of `bsl train` in plain PyTorch, its tokens, and how a program that trains it talks with phase `peer`.

A program imports everything, waits for a line on its stdin, so that its start costs the phase no time, and then prints
a line of JSON for each step.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STD = 0.02
SEED = 0
BETAS, DECAY, LARGEST_NORM = (0.9, 0.95), 0.1, 1.0
"""The defaults of a run file."""

RATE = 1e-5
"""So low that the loss falls from the first step on, without warm-up."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a program trains. `rows` are those of the embedding: `vocabulary` and its padding.

    `backend` is that of torch.compile; None compiles nothing.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    rows: int
    micro_batch: int
    micro_batches: int
    steps: int
    backend: str | None
    device: str
    flops_per_token: float

    @classmethod
    def of_arguments(cls) -> Work:
        """Return what this program was started for, once it is its turn."""
        work = cls(**json.loads(sys.argv[1]))
        if not sys.stdin.readline():
            sys.exit("nobody waits for this program")
        return work

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.micro_batch * self.micro_batches * self.length

    @property
    def first_loss(self) -> float:
        """What the loss must be before the first update: logits are normal, of width x STD^2 variance."""
        return math.log(self.rows) + self.hidden * STD**2 / 2


def draw_tokens(work: Work) -> Tensor:
    """Return the samples of every step, (samples, length + 1): seen again and again, so that the loss falls."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(work.vocabulary, (work.micro_batch * work.micro_batches, work.length + 1), generator=generator)


def print_step(step: int, loss: float, seconds: float, **more: Any) -> None:
    """Report a step to the phase; memory is the peak so far."""
    print(json.dumps({"step": step, "loss": loss, "seconds": seconds, **more}), flush=True)


class Layer(nn.Module):
    """A transformer layer: LayerNorm before causal attention and before a GELU of four times the width."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        width, self.heads = work.hidden, work.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> the same."""
        x = x + self._attend(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(context.transpose(1, 2).reshape(batch, length, width))
        return result


class PlainGpt(nn.Module):
    """Learned positions, and an embedding that is also the output layer. torchtitan compiles each of `layers`."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(work.rows, work.hidden), nn.Embedding(work.length, work.hidden)
        self.layers = nn.ModuleDict({str(number): Layer(work) for number in range(work.layers)})
        self.norm = nn.LayerNorm(work.hidden)

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Draw all weights on their device; layers that write to the residual stream get smaller ones (GPT-2)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(float(name.endswith("norm.weight")))
            else:
                is_output = name.endswith(("output.weight", "down.weight"))
                parameter.normal_(0.0, STD / math.sqrt(2 * len(self.layers)) if is_output else STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> logits (batch, length, rows)."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)
