"""Relaxes a field that is cut into strips: borders go to both neighbours by batch_isend_irecv.

After each exchange a residual is summed over all ranks.

python -m torch.distributed.run --nproc-per-node 4 halo_exchange.py CULPRIT

At step 6 the culprit takes itself for the last strip and sends nothing to its right; that neighbour waits for it.
"""

import sys
import time

import torch
import torch.distributed as dist
from diary import note


def exchange(field, rank, world_size, to_right):
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    ghosts = torch.zeros(2, field.shape[1])
    jobs = [
        dist.P2POp(dist.irecv, ghosts[0], left, tag=1),
        dist.P2POp(dist.irecv, ghosts[1], right, tag=2),
        dist.P2POp(dist.isend, field[0].clone(), left, tag=2),
    ]
    if to_right:
        jobs.append(dist.P2POp(dist.isend, field[-1].clone(), right, tag=1))
    for job in dist.batch_isend_irecv(jobs):
        job.wait()
    return ghosts


def relax(field, ghosts):
    padded = torch.cat([ghosts[:1], field, ghosts[1:]])
    return (padded[:-2] + padded[2:] + 2 * field) / 4


def main():
    culprit = int(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    note("hello", rank)
    field = torch.rand(16, 64)
    for step in range(100_000):
        wrong = rank == culprit and step == 6
        if wrong:
            note("struck", rank)
        ghosts = exchange(field, rank, world_size, to_right=not wrong)
        changed = relax(field, ghosts)
        residual = (changed - field).abs().sum()
        dist.all_reduce(residual)
        field = changed
        time.sleep(0.1)
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
