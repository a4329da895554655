"""Trains a small sequence model with DDP and gradient accumulation: sixteen micro-batches for one synchronised step.

python -m torch.distributed.run --nproc-per-node 4 long_context.py MODE CULPRIT

MODE `even` is healthy. With `forgets`, the culprit takes its sixteenth micro-batch of step 3 for one like the
others, so that its gradients stay at home, and comes to the evaluation of step 3 alone.
"""

import contextlib
import sys
import time

import torch
import torch.distributed as dist
from diary import note
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MICRO = 16


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.cell = nn.GRU(32, 48, batch_first=True)
        self.head = nn.Linear(48, 64)

    def forward(self, words):
        return self.head(self.cell(self.embed(words))[0])


def micro_step(model, sync):
    words = torch.randint(0, 64, (2, 24))
    with contextlib.nullcontext() if sync else model.no_sync():
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        (loss / MICRO).backward()
    return loss.detach()


def main():
    mode, culprit = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    evaluation = dist.new_group()
    model = DistributedDataParallel(Reader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(100_000):
        for micro in range(MICRO):
            last = micro == MICRO - 1
            if last and mode == "forgets" and rank == culprit and step == 3:
                note("struck", rank)
                last = False
            loss = micro_step(model, last)
            time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
        note(f"step {step}", rank)
        if step % 3 == 0:
            dist.all_reduce(loss, group=evaluation)


if __name__ == "__main__":
    main()
