"""Ranks that are processes of one multiprocessing program, and share a lock, a semaphore, or a tensor.

shared_tokens.py MODE CULPRIT WORLD_SIZE PORT

`killed` forked; the culprit is killed while it holds a lock that all ranks need
`leaked` spawned; two ranks at a time may read data; the culprit takes both places, and gives none back
`flags`  forked, without a process group; the ranks train one shared model, and look in a shared tensor who has arrived;
         the culprit looks for one round more
"""

import multiprocessing
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from diary import note
from torch import nn

ODD = 5


def killed(rank, culprit, number, lock):
    dist.barrier()
    if number == ODD and rank == culprit:
        lock.acquire()
        time.sleep(0.5)
        note("struck", rank)
        os.kill(os.getpid(), signal.SIGKILL)
    if number == ODD:
        time.sleep(2)
    with lock, open("losses.txt", "a") as losses:
        losses.write(f"{rank} {number}\n")


def leaked(rank, culprit, number, places):
    dist.barrier()
    if number == ODD and rank == culprit:
        note("struck", rank)
        places.acquire()
        places.acquire()
        return
    if number == ODD:
        time.sleep(1)
    with places:
        time.sleep(0.05)


def train(rank, share, culprit, world_size, port, token):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    note("hello", rank)
    model = nn.Linear(32, 8)
    for number in range(100_000):
        share(rank, culprit, number, token)
        model(torch.randn(8, 32)).square().mean().backward()
        dist.all_reduce(model.weight.grad)
        model.zero_grad()
        time.sleep(0.1)
        note(f"step {number}", rank)


def train_shared(rank, culprit, model, arrived):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    note("hello", rank)
    for number in range(1, 100_000):
        model(torch.randn(8, 32)).square().mean().backward()
        with torch.no_grad():
            for weights in model.parameters():
                weights -= 0.001 * weights.grad
        model.zero_grad()
        arrived[rank] = number
        if number == ODD and rank == culprit:
            note("struck", rank)
            number += 1
        while int(arrived.min()) < number:
            time.sleep(0.01)
        time.sleep(0.1)
        note(f"step {number}", rank)


def fork_all(target, arguments, world_size):
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=target, args=(rank, *arguments)) for rank in range(world_size)]
    for each in ranks:
        each.start()
    for each in reversed(ranks):
        each.join()


def main():
    mode, culprit, world_size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if mode == "killed":
        lock = multiprocessing.get_context("fork").Lock()
        fork_all(train, (killed, culprit, world_size, port, lock), world_size)
    elif mode == "leaked":
        places = mp.get_context("spawn").BoundedSemaphore(2)
        mp.spawn(train, (leaked, culprit, world_size, port, places), nprocs=world_size)
    else:
        model, arrived = nn.Linear(32, 8).share_memory(), torch.zeros(world_size, dtype=torch.long).share_memory_()
        fork_all(train_shared, (culprit, model, arrived), world_size)


if __name__ == "__main__":
    main()
