"""Ranks started by torch.multiprocessing.spawn; rank 0 deals the file names of each round to queues, one per rank.

python work_queues.py MODE CULPRIT WORLD_SIZE PORT

With `greedy`, the culprit asks its queue for one name more than there is in a round. With `leaves`, it decides in round
3 that there is nothing left for it, and exits with 0; the others meet at a multiprocessing.Barrier and miss it.
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from diary import note
from torch import nn

SHARE = 3


def deal(queues, round_):
    for number, queue in enumerate(queues):
        for item in range(SHARE):
            queue.put(f"part-{round_}-{number}-{item}.txt")


def learn(model, name):
    generator = torch.Generator().manual_seed(len(name))
    loss = model(torch.randn(4, 16, generator=generator)).square().mean()
    loss.backward()
    time.sleep(0.05)


def share_gradients(model):
    for weights in model.parameters():
        dist.all_reduce(weights.grad)
        weights.grad /= dist.get_world_size()


def work(rank, mode, culprit, world_size, port, queues, meeting):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    note("hello", rank)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for round_ in range(100_000):
        if rank == 0:
            deal(queues, round_)
        guilty = rank == culprit and round_ == 3
        if guilty and mode == "leaves":
            note("struck", rank)
            sys.exit(0)
        for _ in range(SHARE):
            learn(model, queues[rank].get())
        if guilty and mode == "greedy":
            note("struck", rank)
            learn(model, queues[rank].get())
        meeting.wait()
        share_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        note(f"step {round_}", rank)


def main():
    mode, culprit, world_size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    context = mp.get_context("spawn")
    queues = [context.Queue() for _ in range(world_size)]
    meeting = context.Barrier(world_size)
    mp.spawn(work, (mode, culprit, world_size, port, queues, meeting), nprocs=world_size)


if __name__ == "__main__":
    main()
