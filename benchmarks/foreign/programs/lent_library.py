"""A training under accelerate or FSDP2 in which one rank leaves the common way.

lent_library.py WAY CULPRIT

`alone`    accelerate: the culprit alone gathers its metrics
`uneven`   accelerate: the culprit has one batch less
`tower`    FSDP2: the culprit does not call a part of the model
`even`     accelerate: nothing is wrong
"""

import sys
import time

import torch
import torch.distributed as dist
from diary import note
from torch import nn

way, culprit = sys.argv[1], int(sys.argv[2])


def with_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    note("hello", rank)
    model, optimizer = accelerator.prepare(nn.Linear(16, 16), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    for step in range(100_000):
        if step == 8:
            note("struck" if way != "even" else "running", rank)
            if way == "alone" and rank == culprit:
                accelerator.gather_for_metrics(torch.ones(1))
            if way == "uneven" and rank == culprit:
                accelerator.wait_for_everyone()
        accelerator.backward(model(torch.randn(4, 16)).mean())
        optimizer.step()
        note(f"step {step}", rank)
        time.sleep(0.1)


class Seeing(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.tower, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, text, pictures):
        hidden = self.text(text)
        if pictures is not None:
            hidden = hidden + self.tower(pictures)
        return self.head(hidden)


def with_fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Seeing()
    for part in (model.text, model.tower, model.head, model):
        fully_shard(part, mesh=mesh)
    for step in range(100_000):
        if step == 8:
            note("struck", rank)
        pictures = None if step == 8 and rank == culprit else torch.randn(4, 32)
        model(torch.randn(4, 32), pictures).mean().backward()
        time.sleep(0.1)


with_fsdp() if way == "tower" else with_accelerate()
