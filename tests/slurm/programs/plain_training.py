"""A data parallel training as anyone writes it, started by srun alone; nothing in it knows bsl.

    srun python plain_training.py READY_FOLDER [RANK]

On RANK a thread holds the tokenizer's lock when the data loader forks its worker. The worker inherits a lock that
nobody in it can release: real trainings have this bug.
"""

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

READY = Path(sys.argv[1])
UNLUCKY = sys.argv[2:] == [os.environ["SLURM_PROCID"]]
TOKENIZER_LOCK = threading.Lock()


class Text(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        with TOKENIZER_LOCK:
            return torch.full((8,), float(index % 7))


def warm_up_tokenizer(held, forked):
    with TOKENIZER_LOCK:
        held.set()
        forked.wait()


def batches():
    held, forked = threading.Event(), threading.Event()
    if UNLUCKY:
        threading.Thread(target=warm_up_tokenizer, args=(held, forked), daemon=True).start()
        held.wait()
    loader = iter(DataLoader(Text(), batch_size=4, num_workers=1, multiprocessing_context="fork"))
    forked.set()
    return loader


def train():
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    store = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = batches()
    (READY / f"ready-{rank}").touch()
    for batch in loader:
        model(batch).square().mean().backward()
        average_gradients(model, world_size)
        optimizer.step()
        optimizer.zero_grad()


def average_gradients(model, world_size):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


if __name__ == "__main__":
    train()
