"""Sharded training in which one rank leaves something out that the others do together.

torchrun dropped_layers.py MODE CULPRIT

`drop`   FSDP2; each step leaves out one random layer; the dice of the culprit drop two in step 5
`skip`   ZeroRedundancyOptimizer; the culprit finds a gradient that is not finite, and skips the optimizer's step
"""

import random
import sys
import time

import torch
import torch.distributed as dist
from diary import note
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6))

    def forward(self, rows, left_out):
        for number, layer in enumerate(self.layers):
            rows = rows if number in left_out else rows + layer(rows)
        return rows


def drop(rank, culprit):
    model = Stack()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    dice = random.Random(0)
    for step in range(100_000):
        left_out = dice.sample(range(6), 1)
        if step == 5 and rank == culprit:
            note("struck", rank)
            left_out.append((left_out[0] + 2) % 6)
        model(torch.randn(8, 32), left_out).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
        note(f"step {step}", rank)


def skip(rank, culprit):
    model = DistributedDataParallel(Stack())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    for step in range(100_000):
        model(torch.randn(8, 32), ()).square().mean().backward()
        if step == 5 and rank == culprit:
            note("struck", rank)
            next(model.parameters()).grad.fill_(float("inf"))
        if all(weights.grad.isfinite().all() for weights in model.parameters()):
            optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
        note(f"step {step}", rank)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    note("hello", dist.get_rank())
    {"drop": drop, "skip": skip}[sys.argv[1]](dist.get_rank(), int(sys.argv[2]))
