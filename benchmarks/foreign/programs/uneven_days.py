"""Healthy trainings that do not look even.

uneven_days.py DAY CULPRIT

`branches`  each rank uses another branch of the model in each step; DDP looks for unused parameters
`batches`   the work of a step varies from a tenth of a second to six seconds, from rank to rank
`workers`   each step starts new data loader processes, and collects garbage
`throttled` sleeps for six seconds in each step
`local`     averages the models of the ranks after many local steps, which take some ranks longer than others
`saver`     a thread of the culprit writes checkpoints all the time, slowly; nobody waits for it
`evaluates` after every fourth step the culprit evaluates alone for 12 s, and the others wait in a barrier
`turns`     before every tenth step the ranks read their data one after the other, for 8 s each
`launcher`  the process that started the ranks has been stopped by a signal; they train on
`paused`    the culprit is stopped for four seconds and continued for four, again and again
"""

import gc
import io
import os
import random
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from diary import note
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

DICE = random.Random()
PAUSES = "while kill -STOP $0; do sleep 4; kill -CONT $0; sleep 4; done"


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(24, 24)
        self.branches = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.choose = False

    def forward(self, rows):
        chosen = [DICE.choice(self.branches)] if self.choose else self.branches
        return sum(branch(torch.relu(self.stem(rows))) for branch in chosen)


def compute(seconds):
    until, rows = time.time() + seconds, torch.randn(96, 96)
    while time.time() < until:
        rows = torch.tanh(rows @ rows)


def branches(step, rank, culprit, model):
    model.module.choose = True


def batches(step, rank, culprit, model):
    compute(min(0.1 * DICE.paretovariate(0.7), 6.0))


def workers(step, rank, culprit, model):
    loader = DataLoader(TensorDataset(torch.randn(64, 24)), batch_size=16, num_workers=2)
    for _ in loader:
        compute(0.05)
    gc.collect()


def throttled(step, rank, culprit, model):
    time.sleep(6)


def local(step, rank, culprit, model):
    with model.no_sync():
        for _ in range(60):
            model(torch.randn(8, 24)).square().mean().backward()
            time.sleep(0.1 + 0.03 * rank)


def keep_saving(model):
    while True:
        whole = io.BytesIO()
        torch.save(model.state_dict(), whole)
        with open("newest.pt", "wb") as checkpoint:
            for part in whole.getbuffer().tobytes().splitlines():
                checkpoint.write(part)
                checkpoint.flush()
                os.fsync(checkpoint.fileno())
                time.sleep(0.5)


def saver(step, rank, culprit, model):
    time.sleep(0.2)
    if step == 1 and rank == culprit:
        threading.Thread(target=keep_saving, args=(model.module,), daemon=True).start()


def evaluates(step, rank, culprit, model):
    time.sleep(0.1)
    if step and step % 4 == 0:
        if rank == culprit:
            compute(12)
        dist.barrier()


def turns(step, rank, culprit, model):
    time.sleep(0.1)
    if step % 10 == 5:
        for turn in range(dist.get_world_size()):
            if turn == rank:
                read_data(rank)
            dist.barrier()


def read_data(rank):
    with open(f"data-{rank}.bin", "wb+") as data:
        data.write(bytes(4_000_000))
        data.seek(0)
        while data.read(100_000):
            time.sleep(0.2)


def launcher(step, rank, culprit, model):
    time.sleep(0.1)
    if step == 3 and rank == 0:
        os.kill(os.getppid(), signal.SIGSTOP)


def paused(step, rank, culprit, model):
    time.sleep(0.1)
    if step == 3 and rank == culprit:
        subprocess.Popen(["sh", "-c", PAUSES, str(os.getpid())], start_new_session=True)


DAYS = {
    each.__name__: each
    for each in (branches, batches, workers, throttled, local, saver, evaluates, turns, launcher, paused)
}


def main():
    day, culprit = DAYS[sys.argv[1]], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    DICE.seed(rank)
    note("hello", rank)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(100_000):
        day(step, rank, culprit, model)
        model(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
