"""Programs whose ranks have uneven work by nature: `python -m slowing.uneven KIND LAST_STEP`.

`lengths`: DDP whose sequences differ in length, so that another rank has most to do in each step. `experts`: DDP with
an expert on each rank, to which `all_to_all` sends tokens as a router would. `loss`: a pipeline whose last stage
computes the loss as well.
"""

from __future__ import annotations

import os
import random
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from slowing.foreign import CORE_S, FORWARD_S, LAYERS, ROWS, STAGES, WIDTH, work

LOSS_S, MICRO_BATCHES = 0.02, 4
LONGEST = 2.0


class Layer(nn.Module):
    """A layer that takes its time, by the work that its rank has in this step."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(WIDTH, WIDTH), times

    def forward(self, values: Tensor) -> Tensor:
        work(FORWARD_S * self.times)
        out: Tensor = self.linear(values)
        if out.requires_grad:
            out.register_hook(lambda _: work(2 * FORWARD_S * self.times))
        return out


class Experts(Layer):
    """A layer whose ranks exchange tokens, and each of which works as long as it has got tokens."""

    def forward(self, values: Tensor) -> Tensor:
        dist.all_to_all_single(torch.empty_like(values), values.detach())
        return super().forward(values)


class Batches(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, _index: object) -> Tensor:
        work(2 * CORE_S)
        return torch.ones(MICRO_BATCHES * ROWS, WIDTH)


def shares_of(step: int) -> list[float]:
    """Return the work of each rank in a step: what a router, or lengths of sequences, would give."""
    draw = random.Random(step)
    return [draw.uniform(CORE_S / FORWARD_S * 2, LONGEST) for _ in range(dist.get_world_size())]


def data_parallel(kind: str, last: int) -> None:
    layers = [Experts() if kind == "experts" and at % 2 else Layer() for at in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step, batch in enumerate(DataLoader(Batches(), batch_size=None)):
        for at, layer in enumerate(layers):
            if kind == "lengths" or isinstance(layer, Experts):
                layer.times = shares_of(step if kind == "lengths" else step * LAYERS + at)[dist.get_rank()]
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if step == last:
            break


def pipelined(last: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pp", "dp"))
    at = mesh.get_local_rank("pp")
    model = nn.Sequential(*(Layer() for _ in range(LAYERS // STAGES)))
    stage = PipelineStage(model, at, STAGES, torch.device("cpu"), group=mesh.get_group("pp"))

    def loss(out: Tensor, _target: Tensor) -> Tensor:
        work(LOSS_S)
        return out.square().mean()

    schedule, optimizer = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss), torch.optim.SGD(model.parameters(), 0.01)
    for step, batch in enumerate(DataLoader(Batches(), batch_size=None)):
        optimizer.zero_grad()
        if at == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=[])
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        optimizer.step()
        if step == last:
            break


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1] == "loss":
        pipelined(int(sys.argv[2]))
    else:
        data_parallel(sys.argv[1], int(sys.argv[2]))
    os._exit(0)
