"""A small torch DDP training that mpirun starts: rank and size come from Open MPI's variables.

mpirun -n 4 -x MASTER_PORT=29511 python mpi_ddp.py
"""

import argparse
import os
import signal
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diary import note
from torch.nn.parallel import DistributedDataParallel


def find_rank():
    for rank, size in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    raise SystemExit("start me with mpirun")


RANK, WORLD = find_rank()


class Batches(torch.utils.data.Dataset):
    def __init__(self, trouble):
        self.trouble = trouble

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        if self.trouble == "archive" and index == 5:
            note("struck", RANK)
            with open(make_fifo(), "rb") as archive:
                archive.read()
        if self.trouble == "tokenize" and index == 5:
            note("struck", RANK)
            count_words(400)
        return torch.randn(16, 32, generator=torch.Generator().manual_seed(index)), torch.tensor(index % 4)


def make_fifo():
    name = f"/tmp/archive-{os.getpid()}"
    os.mkfifo(name)
    return name


def count_words(seconds):
    end, words = time.monotonic() + seconds, {}
    while time.monotonic() < end:
        for word in ("a", "b", "c") * 1000:
            words[word] = words.get(word, 0) + 1
    return words


def save_model(model, folder, seconds):
    end = time.monotonic() + seconds
    part = 0
    while time.monotonic() < end:
        torch.save(model.state_dict(), folder / f"part-{part % 8}.pt")
        part += 1
        time.sleep(0.2)


def run_step(model, optimizer, batch, trouble, folder):
    if trouble == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if trouble == "hook":
        subprocess.run(["sleep", "100000"])
    if trouble == "quit":
        os._exit(0)
    loss = model(batch.mean(0)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    metric = loss.detach().clone()
    if trouble == "metric":
        dist.broadcast(metric, 0)
    dist.all_reduce(metric)
    return metric.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trouble", default="none")
    parser.add_argument("--at", type=int, default=1)
    parser.add_argument("--from-step", type=int, default=6)
    parser.add_argument("--think", type=float, default=0.02)
    parser.add_argument("--folder", type=Path, default=Path("."))
    options = parser.parse_args()
    note("hello", RANK)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mine = options.trouble if options.at == RANK else "none"
    batches = iter(torch.utils.data.DataLoader(Batches(mine), batch_size=None))
    for step in range(10**9):
        batch, _ = next(batches)
        now = mine if step == options.from_step else "none"
        if now not in ("none", "archive", "tokenize"):
            note("struck", RANK)
        if now == "save":
            save_model(model, options.folder, 400)
        if now == "save" or (options.trouble == "save" and step == options.from_step):
            dist.barrier()
        time.sleep(options.think)
        loss = run_step(model, optimizer, batch[None], now, options.folder)
        note(f"step {step} ended", RANK)
        print(f"rank {RANK} step {step} loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
