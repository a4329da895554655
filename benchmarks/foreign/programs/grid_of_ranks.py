"""Two programs with mpi4py.

mpirun -n 6 python grid_of_ranks.py MODE CULPRIT

`grid`  ranks in two rows and three columns sum over columns, then over rows; in step 5 the culprit sums over rows twice
`farm`  healthy: rank 0 hands out tasks of different lengths, and looks for answers now and then
"""

import random
import sys
import time

import numpy as np
from diary import note
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def grid(culprit):
    row, column = WORLD.Split(RANK // 3, RANK), WORLD.Split(RANK % 3, RANK)
    matrix, total = np.random.rand(50, 50), np.empty((50, 50))
    for step in range(100_000):
        first = column
        if step == 5 and culprit == RANK:
            note("struck", RANK)
            first = row
        first.Allreduce(np.tanh(matrix @ matrix), total)
        row.Allreduce(total / SIZE, matrix)
        time.sleep(0.1)
        note(f"step {step}", RANK)


def hand_out():
    status = MPI.Status()
    for number in range(100_000):
        while not WORLD.Iprobe(status=status):
            time.sleep(0.05)
        WORLD.recv(source=status.Get_source())
        WORLD.send(number, dest=status.Get_source())


def work_off():
    for step in range(100_000):
        WORLD.send({"free": RANK}, dest=0)
        dice = random.Random(WORLD.recv(source=0))
        until, matrix = time.time() + dice.choice((0.2, 0.5, 1.0, 4.0)), np.random.rand(64, 64)
        while time.time() < until:
            matrix = np.tanh(matrix @ matrix)
        note(f"step {step}", RANK)


if __name__ == "__main__":
    note("hello", RANK)
    if sys.argv[1] == "grid":
        grid(int(sys.argv[2]))
    elif RANK == 0:
        hand_out()
    else:
        work_off()
