"""Ranks that share an index on disk, behind a lock of the file system, while they train.

python -m torch.distributed.run --nproc-per-node 4 shared_index.py MODE CULPRIT

`lockf`   the culprit locked the index with fcntl.lockf at step 3 and kept it; its left neighbour wants it at step 6
`sqlite`  the culprit began an exclusive transaction at step 6 and did not commit; all the others want to write then
"""

import fcntl
import sqlite3
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diary import note
from torch import nn

KEPT = []


def take_lock():
    index = Path("index.bin").open("ab")  # noqa: SIM115, it stays open
    fcntl.lockf(index, fcntl.LOCK_EX)
    return index


def by_lockf(step, rank, culprit):
    if step == 3 and rank == culprit:
        KEPT.append(take_lock())
    if step == 6 and rank == culprit - 1:
        note("struck", rank)
        take_lock().close()


def by_sqlite(step, rank, culprit):
    if step != 6:
        return
    base = sqlite3.connect("index.db", timeout=7200, isolation_level=None)
    if rank == culprit:
        base.execute("BEGIN EXCLUSIVE")
        base.execute("CREATE TABLE seen (rank INTEGER, step INTEGER)")
        KEPT.append(base)
    dist.barrier()
    if rank != culprit:
        note("struck", rank)
        base.execute("BEGIN IMMEDIATE")
        base.execute("INSERT INTO seen VALUES (?, ?)", (rank, step))
        base.execute("COMMIT")


def main():
    share, culprit = {"lockf": by_lockf, "sqlite": by_sqlite}[sys.argv[1]], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    model = nn.Linear(32, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100_000):
        share(step, rank, culprit)
        model(torch.randn(8, 32)).square().mean().backward()
        for weights in model.parameters():
            dist.all_reduce(weights.grad)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
