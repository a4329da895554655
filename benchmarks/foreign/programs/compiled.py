"""A DDP step under torch.compile."""

import os
import sys

import torch
import torch.distributed as dist
from diary import note
from torch.nn.parallel import DistributedDataParallel


class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(int(sys.argv[2])))

    def forward(self, rows):
        for number, layer in enumerate(self.layers):
            rows = torch.nn.functional.softmax(layer(rows) * (number + 1), -1) + torch.sin(rows)
        return rows


rank = int(os.environ["RANK"])
note("hello", rank)
dist.init_process_group("gloo")
side = dist.new_group()
net = torch.compile(DistributedDataParallel(Mixer()))
sgd = torch.optim.SGD(net.parameters(), lr=0.01)
count = 0
note("compiling", rank)
while True:
    net(torch.randn(16, 32)).sum().backward()
    sgd.step()
    sgd.zero_grad()
    count += 1
    if count < 10 or count % 200 == 0:
        note(f"step {count}", rank)
    if sys.argv[1] == "breaks" and count == 6 and rank == 2:
        note("struck", rank)
        dist.all_reduce(torch.zeros(1), group=side)
