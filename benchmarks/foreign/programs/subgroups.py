"""Process groups in every way: made in the loop, nested, in different orders, with objects and with timeouts."""

import argparse
import datetime
import os
import time

import torch
import torch.distributed as dist
from diary import note

LONG = datetime.timedelta(minutes=14)


def halves(size):
    return list(range(size // 2)), list(range(size // 2, size))


def make_pair(size, backwards=False):
    first, second = halves(size)
    if backwards:
        right = dist.new_group(second)
        left = dist.new_group(first)
    else:
        left = dist.new_group(first)
        right = dist.new_group(second)
    return left, right


def regroup(rank, size):
    """Healthy: a fresh pair of groups in every round, as elastic experiments do it."""
    for turn in range(10**9):
        left, right = make_pair(size)
        group = left if rank < size // 2 else right
        dist.all_reduce(torch.ones(1000), group=group)
        dist.destroy_process_group(group)
        if turn < 10 or turn % 20 == 0:
            note(f"step {turn}", rank)


def ordinary(rank, turns):
    for turn in range(turns):
        dist.all_reduce(torch.ones(100))
        note(f"step {turn}", rank)


def act_alone(rank, size, it_is_me):
    if it_is_me:
        note("struck", rank)
        dist.new_group([0, rank])
    for _ in range(10**9):
        dist.all_reduce(torch.ones(10))
        time.sleep(0.01)


def backwards(rank, size, it_is_me):
    """Groups are made in another order on some ranks, then used."""
    if it_is_me:
        note("struck", rank)
    left, right = make_pair(size, it_is_me)
    dist.all_reduce(torch.ones(5), group=left if rank < size // 2 else right)
    for _ in range(10**9):
        dist.all_reduce(torch.ones(10))


def swapped_use(rank, size, it_is_me):
    """Every rank is in two groups of two; two ranks use them in the other order."""
    rows = [dist.new_group([number, number + 1]) for number in range(0, size, 2)]
    columns = [dist.new_group([number, number + 2]) for number in range(2)]
    order = [rows[rank // 2], columns[rank % 2]]
    for turn in range(10**9):
        if turn == 5 and it_is_me:
            note("struck", rank)
            order.reverse()
        for group in order:
            dist.all_reduce(torch.ones(50), group=group)


def object_missing(rank, size, it_is_me):
    other = dist.new_group()
    if it_is_me:
        note("struck", rank)
        dist.barrier(group=other)
    names = [None] * size
    dist.all_gather_object(names, {"rank": rank})


def watched_barrier(rank, size, it_is_me):
    if it_is_me:
        note("struck", rank)
        os.read(os.pipe()[0], 1)
    dist.monitored_barrier(timeout=LONG)


def odd_operation(rank, size, it_is_me):
    """One rank is in a broadcast whose source is elsewhere, the others reduce."""
    if it_is_me:
        note("struck", rank)
        dist.broadcast(torch.ones(3), src=(rank + 1) % size)
    for _ in range(10**9):
        dist.all_reduce(torch.ones(100_000))


def shape_order(rank, size, it_is_me):
    """Parameters of one shape are reduced in another order on one rank: wrong numbers, and no hang."""
    names = ["weight", "bias", "scale"]
    if it_is_me:
        note("struck", rank)
        names.sort()
    tables = {name: torch.full((300_000,), float(len(name))) for name in names}
    while True:
        for name in names:
            dist.all_reduce(tables[name])
            tables[name] /= size


def late_member(rank, size, it_is_me):
    """A subgroup of three; one of them is still loading, for minutes."""
    group = dist.new_group([0, 1, 2])
    if it_is_me:
        note("struck", rank)
        with open("/dev/urandom", "rb") as source, open("table.bin", "wb") as table:
            for _ in range(9000):
                table.write(source.read(100_000))
                table.seek(0)
                time.sleep(0.1)
    if rank in (0, 1, 2):
        dist.all_reduce(torch.ones(10), group=group)
    dist.barrier()


def unmatched_scatter(rank, size, it_is_me):
    """The root of a scatter has already gone to the next gather."""
    piece = torch.zeros(4)
    if it_is_me:
        note("struck", rank)
        dist.gather(piece, [torch.zeros(4) for _ in range(size)], dst=rank)
    dist.scatter(piece, [torch.zeros(4)] * size if it_is_me else None, src=0)
    dist.barrier()


SCENES = {
    "alone": act_alone,
    "backwards": backwards,
    "swapped": swapped_use,
    "objects": object_missing,
    "watched": watched_barrier,
    "operation": odd_operation,
    "shapes": shape_order,
    "late": late_member,
    "scatter": unmatched_scatter,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--scene", default="")
    parser.add_argument("--among", default="")
    options = parser.parse_args()
    mine = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=LONG)
    note("hello", mine)
    count = dist.get_world_size()
    ordinary(mine, 6)
    if options.scene:
        SCENES[options.scene](mine, count, str(mine) in options.among.split(","))
        note("after", mine)
        dist.barrier()
    else:
        regroup(mine, count)
