"""A loop with `Survivor` in which rank 0 waits, in step 2, for a reduction that never ends, as gloo forgets some."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from bigsci_launch.train.survivor import Survivor


def forgotten(state, bucket):
    print("waits", flush=True)
    return Future()


def train(survivor):
    dist.init_process_group("gloo")
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    survivor.keep({"model": model, "optimizer": optimizer})
    ddp = DistributedDataParallel(model)
    for step in survivor.steps(4):
        if (step.number, os.environ["RANK"], os.environ["BSL_GENERATION"]) == (2, "0", "0"):
            ddp.register_comm_hook(None, forgotten)
        for micro_batch in step:
            (ddp(torch.ones(1, 8)).square().mean() * micro_batch.weight).backward()
        with step.update():
            optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    Survivor(global_batch=2, micro_batch=1).run(train)
