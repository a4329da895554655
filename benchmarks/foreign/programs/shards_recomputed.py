"""Trains blocks whose weights are sharded (fully_shard) and whose activations are computed again in the backward pass.

python -m torch.distributed.run --nproc-per-node 4 shards_recomputed.py MODE CULPRIT

MODE `even` is healthy. With `nan`, the culprit throws away one batch because its loss is not a number, before the
backward pass, and continues to the logging; the other ranks go backward.
"""

import sys
import time

import torch
import torch.distributed as dist
from diary import note
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def build(world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    model = Tower()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    mode, culprit = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    logging = dist.new_group()
    model = build(dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(100_000):
        loss = model(torch.randn(8, 32)).square().mean()
        broken = mode == "nan" and rank == culprit and step == 5
        if broken:
            note("struck", rank)
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown, group=logging)
        time.sleep(0.2)
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
