"""Gradients travel by non-blocking MPI while the next rows are prepared; borders are exchanged with Isend and Irecv.

mpirun -n 4 python mpi_overlap.py MODE CULPRIT

MODE `even` is healthy. With `tag`, the culprit expects a border under the tag of the next step.
"""

import sys
import time

import numpy as np
from diary import note
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def borders(rows, tag_in, tag_out):
    ghost = np.empty(rows.shape[1])
    requests = [
        WORLD.Irecv(ghost, source=(RANK - 1) % SIZE, tag=tag_in),
        WORLD.Isend(np.ascontiguousarray(rows[-1]), dest=(RANK + 1) % SIZE, tag=tag_out),
    ]
    MPI.Request.Waitall(requests)
    return ghost


def gradient(rows, weights):
    return rows.T @ (rows @ weights - 1.0) / len(rows)


def main():
    mode, culprit = sys.argv[1], int(sys.argv[2])
    note("hello", RANK)
    dice = np.random.default_rng(RANK)
    weights, rows = np.zeros(64), dice.normal(size=(256, 64))
    for step in range(100_000):
        wrong = mode == "tag" and culprit == RANK and step == 5
        if wrong:
            note("struck", RANK)
        rows[0] += 0.01 * borders(rows, step + 1 if wrong else step, step)
        mine, total = gradient(rows, weights), np.empty(64)
        travelling = WORLD.Iallreduce(mine, total)
        rows = dice.normal(size=(256, 64))
        time.sleep(0.15)
        travelling.Wait()
        weights -= 0.05 * total / SIZE
        note(f"step {step}", RANK)


if __name__ == "__main__":
    main()
