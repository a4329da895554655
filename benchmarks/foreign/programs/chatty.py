"""A training loop that talks: a progress bar, a dump of its weights, a checkpoint that the others look for.

RANK=0 WORLD_SIZE=4 ... python chatty.py MODE CULPRIT

`bar`    healthy: rank 0 draws a progress bar many times a step
`dump`   the culprit prints all its weights at step 4
`gone`   the culprit ends with os._exit at step 4, before it writes its part of the checkpoint; the others look for the
         part once a second
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diary import note
from torch import nn


def draw(step, part):
    sys.stdout.write(f"\rstep {step} [{'#' * part:20s}] {part * 5:3d} %")
    sys.stdout.flush()


def train_step(model, optimizer, step, bar):
    for part in range(20):
        loss = model(torch.randn(16, 64)).square().mean() / 20
        loss.backward()
        time.sleep(0.01)
        if bar:
            draw(step, part)
    for weights in model.parameters():
        dist.all_reduce(weights.grad)
    optimizer.step()
    optimizer.zero_grad()


def checkpoint(model, rank, world_size):
    torch.save(model.state_dict(), f"part-{rank}.pt.new")
    Path(f"part-{rank}.pt.new").rename(f"part-{rank}.pt")
    while not all(Path(f"part-{other}.pt").exists() for other in range(world_size)):
        time.sleep(1)


def main():
    mode, culprit = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    note("hello", rank)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100_000):
        train_step(model, optimizer, step, bar=mode == "bar" and rank == 0)
        if step == 4 and rank == culprit and mode != "bar":
            note("struck", rank)
            if mode == "gone":
                os._exit(3)
            print([weights.tolist() for weights in model.parameters()], flush=True)
        if step == 4 and mode == "gone":
            checkpoint(model, rank, world_size)
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
