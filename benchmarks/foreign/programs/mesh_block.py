"""A transformer block on a 2-D mesh: tensor parallel on one axis, replicated or sharded data on the other."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from diary import note
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, hidden):
        return hidden + self.down(torch.nn.functional.gelu(self.up(hidden)))


def build(mesh, kind):
    torch.manual_seed(2)
    net = nn.Sequential(FeedForward(), FeedForward())
    if kind == "hsdp":
        for part in net:
            fully_shard(part, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    for part in net:
        parallelize_module(part, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["dp"])


def sync_counters(mesh, swap):
    """Two reductions that everybody does in the same order, except those who swap."""
    names = ("dp", "tp")
    for name in reversed(names) if swap else names:
        group = mesh.get_group(name)
        dist.all_reduce(torch.ones(2), group=group)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="tp")
    parser.add_argument("--odd", default="")
    parser.add_argument("--what", default="")
    options = parser.parse_args()
    odd = {int(number) for number in options.odd.split(",") if number}
    rank = int(os.environ["RANK"])
    note("hello", rank)
    names = ("replica", "shard") if options.kind == "hsdp" else ("dp", "tp")
    mesh = init_device_mesh("cpu", (2, int(os.environ["WORLD_SIZE"]) // 2), mesh_dim_names=names)
    net = build(mesh, options.kind)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    everyone = dist.new_group()
    batch = 0
    while True:
        mine = rank in odd and batch == 6
        if mine and options.what:
            note("struck", rank)
            if options.what == "skips":
                dist.barrier(group=everyone)
            if options.what == "reads":
                os.read(os.pipe()[0], 1)
            if options.what == "slow":
                for _ in range(220):
                    time.sleep(4)
        if options.what == "swap" and batch == 6:
            sync_counters(mesh, mine)
        net(torch.randn(4, 16, 64)).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
        batch += 1
        if batch < 10 or batch % 50 == 0:
            note(f"step {batch}", rank)


if __name__ == "__main__":
    main()
