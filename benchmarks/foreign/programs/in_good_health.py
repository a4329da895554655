"""Trainings that are healthy, although something looks odd or slow.

in_good_health.py WAY RANK [--rank R --world-size N --url URL]

`steady`     nothing odd
`backs_off`  all sleep for five minutes, as a store of objects asked them to
`curriculum` all sleep for nine seconds between five steps
`saves`      all write a file slowly, again and again
`evaluates`  RANK evaluates alone for a minute, the others wait in a barrier
`downloads`  RANK reads a file slowly, the others wait
`long`       a step takes twelve seconds of computing
`odd`        RANK does another, longer thing in every step, and is right: the others wait a little
`forward`    RANK is slower by 400 ms in each step
`loader`     RANK waits half a second for each batch
`collects`   each rank runs the garbage collector at other times
`pipeline`   stages send and receive
"""

import argparse
import gc
import os
import time

import torch
import torch.distributed as dist
from diary import note

HALF_MIB = b"x" * (1 << 19)


def compute(seconds):
    until = time.monotonic() + seconds
    some = torch.randn(64, 64)
    while time.monotonic() < until:
        some = torch.tanh(some @ some)
    return some


def trickle(path, seconds):
    until = time.monotonic() + seconds
    with open(path, "wb") as out:
        while time.monotonic() < until:
            out.write(HALF_MIB)
            out.flush()
            os.fsync(out.fileno())
            time.sleep(0.25)


def steady(rank, is_odd, step):
    time.sleep(0.1)


def backs_off(rank, is_odd, step):
    if step == 10:
        time.sleep(300)
    time.sleep(0.1)


def curriculum(rank, is_odd, step):
    time.sleep(9 if step % 5 == 0 else 0.05)


def saves(rank, is_odd, step):
    trickle(f"shard-{rank}", 12) if step % 5 == 4 else time.sleep(0.05)


def evaluates(rank, is_odd, step):
    if step == 10:
        if is_odd:
            for _ in range(600):
                compute(0.1)
                note(f"evaluated {_}", rank)
        dist.barrier()
    time.sleep(0.1)


def downloads(rank, is_odd, step):
    if step == 10:
        if is_odd:
            trickle("weights", 60)
        dist.barrier()
    time.sleep(0.1)


def long(rank, is_odd, step):
    compute(12)


def odd(rank, is_odd, step):
    compute(0.3 if is_odd else 0.2)


def forward(rank, is_odd, step):
    compute(0.45 if is_odd else 0.05)


def loader(rank, is_odd, step):
    time.sleep(0.55 if is_odd else 0.05)


def collects(rank, is_odd, step):
    rubbish = [[number] for number in range(200_000)]
    if step % 4 == rank % 4:
        gc.collect()
    return len(rubbish)


def pipeline(rank, is_odd, step):
    if rank:
        dist.recv(torch.empty(64), rank - 1)
    compute(0.05)
    if rank + 1 < dist.get_world_size():
        dist.send(torch.ones(64), rank + 1)


WAYS = {
    each.__name__: each
    for each in (
        steady, backs_off, curriculum, saves, evaluates, downloads, long, odd, forward, loader, collects, pipeline,
    )
}  # fmt: skip


def train(options):
    rank = dist.get_rank()
    note("hello", rank)
    for step in range(100_000):
        note(f"step {step}", rank)
        WAYS[options.way](rank, rank == options.odd, step)
        dist.all_reduce(torch.ones(1024))


def spawned(rank, options):
    dist.init_process_group("gloo", init_method=options.url, rank=rank, world_size=options.world_size)
    train(options)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("odd", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--url")
    parser.add_argument("--spawn", action="store_true")
    options = parser.parse_args()
    if options.spawn:
        torch.multiprocessing.spawn(spawned, args=(options,), nprocs=options.world_size)
        return
    if options.rank is not None:
        spawned(options.rank, options)
    dist.init_process_group("gloo")
    train(options)


if __name__ == "__main__":
    main()
