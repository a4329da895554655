"""DDP within Join: the culprit has few inputs, and shadows the collectives of the others after them. Healthy.

python -m torch.distributed.run --nproc-per-node 4 uneven_inputs.py CULPRIT
"""

import sys
import time

import torch
import torch.distributed as dist
from diary import note
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def main():
    culprit = int(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Join([model]):
        for step in range(4 if rank == culprit else 100_000):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.15)
            note(f"step {step}", rank)


if __name__ == "__main__":
    main()
