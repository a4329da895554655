"""A small training with one mistake, of kinds that the other programs do not have.

small_hours.py WAY CULPRITS

CULPRITS are the ranks that do wrong, `1` or `0,1,3`. Twelve steps go well before.

`worker`    a worker of the data loader wants a lock that was held when it was forked
`sealed`    locks a checkpoint that a forgotten process has locked
`uneven`    has two batches more than the others, which go to the barrier
`objects`   gathers objects where the others gather them for all
`census`    does not gather the census of the fourth step, as it did three times before
`order`     reduces over the two groups of its pair in the other order
`preempted` saves in a signal handler, with a barrier that the others do not know of
`crossed`   its main thread and its writer want each other's lock
`frozen`    waits for the answer of a helper that is stopped
`counted`   counts too few devices, and leaves out what all ranks do
`early`     returns from the training, and waits for a thread that never ends
`swallowed` swallows an exception of its reduction, and is one behind from then on
`examines`  evaluates for two minutes; the others wait in a barrier with a time limit
`cools`     all ranks rest for 40 s after each third step
"""

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from diary import note
from torch.utils.data import DataLoader, Dataset

STEPS = 12
INDEX_LOCK = multiprocessing.get_context("fork").Lock()
STATE_LOCK, FILE_LOCK = threading.Lock(), threading.Lock()
HELPER = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"
KEEPER = (
    "import fcntl, time\nf = open('model.ckpt', 'w')\nfcntl.lockf(f, 2)\nprint('locked', flush=True)\ntime.sleep(9999)"
)


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        with INDEX_LOCK:
            return torch.full((8,), float(index))


class Job:
    def __init__(self, culprits):
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_wrong = self.rank in culprits
        self.weights = torch.randn(64, 64)
        self.groups = ()

    def with_groups(self):
        made = [[dist.new_group([first, first + 1]) for _ in range(2)] for first in range(0, self.size, 2)]
        self.groups = made[self.rank // 2]

    def compute(self, seconds=0.05):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.weights = torch.tanh(self.weights @ self.weights)

    def reduce(self, group=None):
        dist.all_reduce(self.weights.mean().reshape(1), group=group)

    def reduce_groups(self, groups):
        for group in groups:
            self.reduce(group)

    def census(self):
        dist.all_gather_object([None] * self.size, {"rank": self.rank, "samples": 64})

    def step(self, number):
        self.compute()
        self.reduce()
        self.reduce_groups(self.groups)
        time.sleep(0.1)


def worker(job):
    if job.is_wrong:
        INDEX_LOCK.acquire()
    for batch in DataLoader(Samples(), batch_size=4, num_workers=1, multiprocessing_context="fork"):
        job.weights[0, 0] = batch.mean()
        job.step(0)


def sealed(job):
    if job.is_wrong:
        import fcntl

        keeper = subprocess.Popen([sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, start_new_session=True)
        keeper.stdout.readline()
        with open("model.ckpt", "a") as page:
            fcntl.lockf(page, fcntl.LOCK_EX)
    job.step(0)


def uneven(job):
    for number in range(6 if job.is_wrong else 4):
        job.step(number)
    dist.barrier()


def objects(job):
    mine = {"rank": job.rank, "loss": 0.1}
    if job.is_wrong:
        dist.gather_object(mine, [None] * job.size if job.rank == 0 else None, dst=0)
    else:
        dist.all_gather_object([None] * job.size, mine)
    job.step(0)


def census(job):
    for number in range(4):
        job.step(number)
    if not job.is_wrong:
        job.census()
    for number in range(4):
        job.step(number)


def order(job):
    job.compute()
    job.reduce()
    job.reduce_groups(reversed(job.groups) if job.is_wrong else job.groups)
    job.reduce()


def preempted(job):
    signal.signal(signal.SIGUSR2, lambda *_: dist.barrier())
    for number in range(8):
        if job.is_wrong and number == 4:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        job.step(number)


def write_states():
    with FILE_LOCK:
        time.sleep(0.5)
        with STATE_LOCK:
            return "written"


def crossed(job):
    if job.is_wrong:
        threading.Thread(target=write_states, name="writer", daemon=True).start()
        with STATE_LOCK:
            time.sleep(0.2)
            with FILE_LOCK:
                job.weights *= 0.5
    job.step(0)


def frozen(job):
    if job.is_wrong:
        helper = subprocess.Popen(
            [sys.executable, "-c", HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        helper.stdin.write("read shard 1\n")
        helper.stdout.readline()
        helper.send_signal(signal.SIGSTOP)
        helper.stdin.write("read shard 2\n")
        helper.stdout.readline()
    job.step(0)


def counted(job):
    if not job.is_wrong:
        dist.all_gather([torch.empty(4) for _ in range(job.size)], torch.full((4,), float(job.rank)))
    dist.barrier()
    job.step(0)


def early(job):
    if job.is_wrong:
        uploads = threading.Event()
        sender = threading.Thread(target=uploads.wait, name="uploader")
        sender.start()
        sender.join()
    job.step(0)


def swallowed(job):
    for number in range(5):
        try:
            if job.is_wrong and number == 1:
                raise RuntimeError("a batch has no tokens")
            job.step(number)
        except RuntimeError as error:
            print(f"step {number}: {error}", flush=True)
    dist.barrier()


def examines(job):
    if job.is_wrong:
        for number in range(240):
            job.compute(0.5)
            note(f"examined {number}", job.rank)
    dist.monitored_barrier(timeout=timedelta(minutes=30))


def cools(job):
    for number in range(1000):
        job.step(number)
        note(f"cooled {number}", job.rank)
        if number % 3 == 2:
            time.sleep(40)


WAYS = {
    each.__name__: each
    for each in (
        worker, sealed, uneven, objects, census, order, preempted, crossed, frozen, counted, early, swallowed, examines,
        cools,
    )
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("culprits")
    options = parser.parse_args()
    job = Job({int(rank) for rank in options.culprits.split(",")})
    note("hello", job.rank)
    if options.way == "order":
        job.with_groups()
    for number in range(STEPS):
        job.step(number)
        if options.way == "census" and number % 4 == 3:
            job.census()
    note("struck", job.rank)
    WAYS[options.way](job)
    dist.barrier()
    time.sleep(1000)


if __name__ == "__main__":
    main()
