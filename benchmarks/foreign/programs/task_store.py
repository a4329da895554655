"""Rank 0 hands out tasks through a TCPStore, the other ranks fetch them; everybody polls. There is no process group.

RANK=0 WORLD_SIZE=4 MASTER_ADDR=... MASTER_PORT=... task_store.py MODE CULPRIT

`even` is healthy. With `loses`, a task of the culprit fails in round 5; it reports that, and does not count the task.
"""

import os
import sys
import time

import torch
from diary import note
from torch import nn
from torch.distributed import TCPStore


def coordinate(store, workers):
    for number in range(100_000):
        store.set(f"round/{number}", str(1000 + number))
        while store.add(f"done/{number}", 0) < workers:
            time.sleep(0.2)
        note(f"step {number}", 0)


def fit(seed):
    torch.manual_seed(seed)
    model = nn.Linear(64, 64)
    until = time.time() + 0.7
    while time.time() < until:
        model(torch.randn(64, 64)).square().mean().backward()
        model.zero_grad()


def work(store, rank, fails):
    for number in range(100_000):
        while not store.check([f"round/{number}"]):
            time.sleep(0.2)
        seed = int(store.get(f"round/{number}"))
        try:
            if number == 5 and fails:
                note("struck", rank)
                raise ValueError(f"no data for {seed}")
            fit(seed)
            store.add(f"done/{number}", 1)
        except ValueError as error:
            print("task failed:", error, flush=True)
        note(f"step {number}", rank)


def main():
    mode, culprit = sys.argv[1], int(sys.argv[2])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    note("hello", rank)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, is_master=rank == 0)
    if rank == 0:
        coordinate(store, world_size - 1)
    else:
        work(store, rank, mode == "loses" and rank == culprit)


if __name__ == "__main__":
    main()
