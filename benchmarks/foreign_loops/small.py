"""What the four loops share: a small language model, samples, and defects that a loop applies to itself by name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 4
AT = 4
"""The step at which a defect begins; steps count from 1."""


class Block(nn.Module):
    """A pre-norm layer: causal attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class SmallModel(nn.Module):
    """A GPT whose last layer is tied to the embedding."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token of (batch, length) from those before it."""
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def make_model() -> SmallModel:
    """Return the same model on every rank."""
    torch.manual_seed(1)
    return SmallModel()


def options() -> argparse.Namespace:
    """Read the arguments that every loop has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--defect", default="")
    parser.add_argument("--interval", default="1")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--events")
    arguments, _ = parser.parse_known_args()
    arguments.interval = arguments.interval if arguments.interval == "auto" else int(arguments.interval)
    return arguments


def batches(steps: int, rank: int, defect: str) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each step, from 1, and this rank's samples of (batch, length + 1) tokens."""
    for step in range(1, steps + 1):
        reader = 0 if defect == "same-data" and step >= AT else rank
        is_replayed = defect == "replayed" and step >= AT
        generator = torch.Generator().manual_seed(1000 * (step - 2 * is_replayed) + reader)
        start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
        yield step, (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def is_victim(defect: str, name: str, step: int) -> bool:
    """Return whether this rank, the last, is to apply the defect `name` in this step."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return defect == name and step == AT and rank == world - 1


def spoil_moments(optimizer: torch.optim.Optimizer, defect: str, step: int) -> None:
    """Change the optimizer's state behind its back, after the step before, as damaged memory does."""
    from torch.distributed.tensor import DTensor

    for group in optimizer.param_groups:
        for tensor in group["params"]:
            state = optimizer.state[tensor]
            parts = {
                key: value.to_local() if isinstance(value, DTensor) else value
                for key, value in state.items()
                if key.startswith("exp_avg") and value.numel()
            }
            if not all(part.numel() for part in parts.values()) or not parts:
                continue
            if is_victim(defect, "moments-zeroed", step):
                parts["exp_avg"].zero_()
            if is_victim(defect, "moments-huge", step):
                parts["exp_avg"].view(-1)[0] = 1e34
            if is_victim(defect, "step-reset", step):
                state["step"].zero_()


def spoil_settings(optimizer: torch.optim.Optimizer, defect: str, step: int) -> None:
    """Change the learning rate on one rank."""
    if is_victim(defect, "lr-apart", step):
        for group in optimizer.param_groups:
            group["lr"] *= 3


def spoil_weights(model: nn.Module, defect: str, step: int) -> None:
    """Change a weight on one rank."""
    from torch.distributed.tensor import DTensor

    parameter = next(each for name, each in model.named_parameters() if name.endswith("layers.1.up.weight"))
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    with torch.no_grad():
        if is_victim(defect, "weight-apart", step):
            part.view(-1)[5] += 0.01
        if is_victim(defect, "nan", step):
            part.view(-1)[5] = float("nan")


def leave() -> None:
    """End this rank without the interpreter's own exit.

    DeepSpeed and DeviceMesh keep process groups in globals, so gloo's threads live until then, and torch was seen to
    abort there (`terminate called without an active exception`), long after the guards had ended.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
