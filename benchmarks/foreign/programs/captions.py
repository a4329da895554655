"""Trains on captions with accelerate: each rank reads its own shard of lines through an iterable data set.

python -m torch.distributed.run --nproc-per-node 4 captions.py MODE CULPRIT

With `short`, the culprit's shard has fewer batches than the others. With `tokens`, the main process turns the text into
tokens in a pool of children first, line by line into a cache, while the others wait for it; that takes a long time.
"""

import hashlib
import multiprocessing
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from diary import note
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Shard(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        for _ in range(self.batches):
            words = torch.randint(0, 50, (8, 12))
            yield words[:, :-1], words[:, -1]


def tokenise(number):
    words = hashlib.sha256(str(number).encode()).hexdigest()
    for _ in range(2000):
        words = hashlib.sha256(words.encode()).hexdigest()
    time.sleep(0.2)
    return words


def warm_cache(rank):
    note("struck", rank)
    with multiprocessing.Pool(12) as pool, Path("cache.txt").open("w") as cache:
        for words in pool.imap(tokenise, range(200_000), chunksize=4):
            cache.write(words + "\n")


def train(accelerator, rank, batches):
    model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(16 * 11, 50))
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(Shard(batches), batch_size=None)
    for step, (words, target) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(words), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.gather(loss.detach().reshape(1))
        time.sleep(0.1)
        note(f"step {step}", rank)


def main():
    mode, culprit = sys.argv[1], int(sys.argv[2])
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    note("hello", rank)
    with accelerator.main_process_first():
        if mode == "tokens" and accelerator.is_main_process:
            warm_cache(rank)
    short = mode == "short" and rank == culprit
    train(accelerator, rank, 9 if short else 100_000)
    note("struck", rank)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
