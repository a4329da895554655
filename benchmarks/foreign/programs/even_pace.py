"""Healthy training at a pace of its own.

python -m torch.distributed.run --nproc-per-node 4 even_pace.py PACE

`rests`      each rank sleeps half a second in each step
`long`       each step computes for eight seconds before anything is exchanged
`evaluates`  an evaluation follows every step, whose results are gathered as objects on rank 0
"""

import sys
import time

import torch
import torch.distributed as dist
from diary import note
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def compute(seconds):
    until, rows = time.time() + seconds, torch.randn(96, 96)
    while time.time() < until:
        rows = torch.tanh(rows @ rows)


def evaluate(model, rank):
    with torch.no_grad():
        losses = [float(model(torch.randn(8, 24)).square().mean()) for _ in range(10)]
    gathered = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object({"rank": rank, "losses": losses}, gathered, dst=0)


def main():
    pace = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 8)))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(100_000):
        if pace == "long":
            compute(8)
        else:
            time.sleep(0.5 if pace == "rests" else 0.05)
        model(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if pace == "evaluates":
            evaluate(model, rank)
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
