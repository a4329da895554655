"""Ranks of a small training that do not issue the same collectives: the few are wrong, or the many are.

parting.py WAY CULPRITS [--after STEP]

CULPRITS are the ranks that do wrong, `1` or `0,1,3`. Until step --after, all do the same.

`loss`      leave out the reduction of gradients, since their loss is no number
`report`    gather a report that the others do not ask for
`quiet`     do not gather the report that the others gather in each fourth step
`clips`     clip by a norm over a second group of the world
`pairs`     leave out the gather of their pair
`node`      take the barrier of their pair for that of the world
`thread`    let a thread's gather of a checkpoint come after their own barrier
`early`     are done with the epoch and go to the barrier
`longer`    have one batch more
`resume`    begin the epoch again, which the others have resumed
`reduce`    reduce to rank 0 where all reduce to all
`shapes`    expect the shapes of a message first, which the stage before does not send
`sends`     send first, as the next stage does
`lean`      leave out an expert whose weights are gathered before use
`excepts`   take an exception for the end, and go to the barrier
`publish`   do not publish a key of the store, which rank 2 reads
`root`      take another rank for the source of a broadcast
"""

import argparse
import threading
import time

import torch
import torch.distributed as dist
from diary import note
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Training:
    def __init__(self, culprits):
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_wrong = self.rank in culprits
        self.weights = [nn.Parameter(torch.randn(32, 32)) for _ in range(3)]
        self.pair = None
        self.everyone = None

    def with_pairs(self):
        pairs = [dist.new_group([first, first + 1]) for first in range(0, self.size, 2)]
        self.pair = pairs[self.rank // 2]

    def reduce_gradients(self):
        for weight in self.weights:
            gradient = (weight @ weight).mean().expand(32, 32).contiguous()
            dist.all_reduce(gradient)

    def gather_report(self, step):
        said = [None] * self.size
        dist.all_gather_object(said, {"step": step, "rank": self.rank})
        return said

    def step(self, number):
        self.reduce_gradients()
        if number % 4 == 3:
            self.gather_report(number)
        time.sleep(0.1)

    def gather_pair(self):
        mine = torch.ones(8)
        dist.all_gather([torch.empty(8), torch.empty(8)], mine, group=self.pair)

    def synchronise(self, group=None):
        dist.barrier(group=group)


def loss(job, number):
    if not job.is_wrong:
        job.reduce_gradients()
    go_on(job, number)


def go_on(job, number):
    for later in range(number + 1, number + 12):
        job.step(later)


def report(job, number):
    if job.is_wrong:
        job.gather_report(number)
    go_on(job, number)


def quiet(job, number):
    job.reduce_gradients()
    if not job.is_wrong:
        job.gather_report(number)
    go_on(job, number)


def clip_by_norm(job):
    norm = torch.ones(1)
    dist.all_reduce(norm, group=job.everyone)
    return norm


def clips(job, number):
    if job.is_wrong:
        clip_by_norm(job)
    job.reduce_gradients()


def pairs(job, number):
    job.reduce_gradients()
    if not job.is_wrong:
        job.gather_pair()
    go_on(job, number)


def node(job, number):
    job.synchronise(job.pair if job.is_wrong else None)


def save_aside(job):
    said = [None] * job.size
    dist.all_gather_object(said, job.rank)


def thread(job, number):
    saver = threading.Thread(target=save_aside, args=(job,), name="saver")
    if job.is_wrong:
        later = threading.Timer(2.0, saver.start)
        later.start()
    else:
        saver.start()
        time.sleep(0.5)
    job.synchronise()
    saver.join()


def early(job, number):
    if job.is_wrong:
        job.synchronise()
    job.step(number)


def longer(job, number):
    if job.is_wrong:
        job.step(number)
    job.synchronise()


def resume(job, number):
    if not job.is_wrong:
        job.gather_report(number)
    for again in range(4):
        job.step(again)


def lower(job):
    dist.reduce(torch.ones(64), dst=0)


def reduce(job, number):
    if job.is_wrong:
        lower(job)
    job.reduce_gradients()


def ask_shapes(job):
    shapes = torch.zeros(3, dtype=torch.int64)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, shapes, job.rank - 1, tag=7)]):
        work.wait()


def pass_on(job):
    if job.rank:
        dist.irecv(torch.empty(16), job.rank - 1).wait()
    if job.rank + 1 < job.size:
        dist.isend(torch.ones(16), job.rank + 1).wait()


def shapes(job, number):
    if job.is_wrong:
        ask_shapes(job)
    pass_on(job)
    job.synchronise()


def sends(job, number):
    """Stages exchange in pairs: even ones send first."""
    other = (job.rank + 1 if job.rank % 2 == 0 else job.rank - 1) % job.size
    big = torch.ones(4_000_000)
    if job.rank % 2 == 0 or job.is_wrong:
        dist.send(big, other)
        dist.recv(torch.empty_like(big), other)
    else:
        dist.recv(torch.empty_like(big), other)
        dist.send(big, other)
    job.synchronise()


def use_expert(job, number):
    whole = [torch.empty(16) for _ in range(job.size)]
    dist.all_gather(whole, torch.full((16,), float(number)))


def lean(job, number):
    for expert in range(3):
        if expert == 1 and job.is_wrong:
            continue
        use_expert(job, expert)
    dist.reduce_scatter(torch.empty(16), [torch.ones(16) for _ in range(job.size)])


def excepts(job, number):
    try:
        if job.is_wrong:
            raise ValueError("a sample has no label")
        job.reduce_gradients()
    except ValueError as error:
        print(f"stopping early: {error}", flush=True)
    job.synchronise()


def publish(job, number):
    store = dist.distributed_c10d._get_default_store()
    if job.rank == 0 and not job.is_wrong:
        store.set(f"vocabulary/{number}", "ready")
    if job.rank == 2:
        store.get(f"vocabulary/{number}")
    job.reduce_gradients()


def root(job, number):
    dist.broadcast(torch.ones(8), src=1 if job.is_wrong else 0)
    job.synchronise()


WAYS = {
    each.__name__: each
    for each in (
        loss, report, quiet, clips, pairs, node, thread, early, longer, resume, reduce, shapes, sends, lean, excepts,
        publish, root,
    )
}  # fmt: skip


def even_data_parallel(job, steps):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 1)))
    for _ in range(steps):
        model(torch.randn(4, 24)).mean().backward()
        time.sleep(0.1)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("culprits")
    parser.add_argument("--after", type=int, default=11)
    parser.add_argument("--ddp", action="store_true", help="reduce gradients as DistributedDataParallel does")
    options = parser.parse_args()
    job = Training({int(rank) for rank in options.culprits.split(",")})
    note("hello", job.rank)
    if options.way in ("pairs", "node"):
        job.with_pairs()
    if options.way == "clips":
        job.everyone = dist.new_group(list(range(job.size)))
    if options.ddp:
        model = even_data_parallel(job, 3)
        job.reduce_gradients = lambda: model(torch.randn(4, 24)).mean().backward()
    for number in range(options.after):
        job.step(number)
        if job.pair is not None:
            job.gather_pair()
        if options.way == "publish" and job.rank == 0:
            dist.distributed_c10d._get_default_store().set(f"vocabulary/{number}", "ready")
    note("struck", job.rank)
    WAYS[options.way](job, options.after)
    dist.barrier()
    time.sleep(1000)


if __name__ == "__main__":
    main()
