"""A program that knows nothing of `bsl`: slow layers, a data loader, saves. Arguments: its style, and the last step.

Styles are DDP, FSDP2, a pipeline of torch with two stages, layers that two ranks share, and a pipeline of such layers;
the replicas of the last three average their gradients themselves.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from disturb import Disturber
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, ROWS, LAYERS, FORWARD_S, LOAD_S = 256, 64, 4, 0.008, 0.008
CORE_S = 0.0003
"""How much of a layer's time is spent on a core: a quota holds that up, and the other ranks on the core wait for it."""
SAVE_EVERY, STAGES, MICRO_BATCHES = 4, 2, 4
AXES = {"pipe": ("pp", "dp"), "tensor": ("dp", "tp"), "3d": ("pp", "dp", "tp")}
"""Of the mesh of a style, the slowest first."""


class Slept(nn.Module):
    """A layer that takes its time, as a device would."""

    def __init__(self, disturber: Disturber) -> None:
        super().__init__()
        self.linear, self.disturber = nn.Linear(WIDTH, WIDTH), disturber

    def forward(self, values: Tensor) -> Tensor:
        self.disturber.at("forward", lasts=FORWARD_S)
        work(FORWARD_S + self.disturber.moved(FORWARD_S - CORE_S))
        out: Tensor = self.linear(values)
        if out.requires_grad:
            out.register_hook(self.returned)
        return out

    def returned(self, _gradient: Tensor) -> None:
        self.disturber.at("backward", lasts=2 * FORWARD_S)
        work(2 * FORWARD_S)


class Together(torch.autograd.Function):
    """Sums what the ranks of a group have, in forward and in backward, as around a pair of split layers."""

    @staticmethod
    def forward(context: Any, values: Tensor, group: Any) -> Tensor:
        context.group = group
        dist.all_reduce(values := values.clone(), group=group)
        return values

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(gradient := gradients[0].clone(), group=context.group)
        return gradient, None


class Split(nn.Module):
    """A layer that two ranks share."""

    def __init__(self, layer: nn.Module, group: Any) -> None:
        super().__init__()
        self.layer, self.group = layer, group

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = Together.apply(self.layer(values), self.group)
        return out


def work(seconds: float) -> None:
    """Wait as for a device, and compute a little."""
    time.sleep(seconds - CORE_S)
    numbers, end = torch.ones(64, 64), time.thread_time() + CORE_S
    while time.thread_time() < end:
        numbers @ numbers


class Batches(Dataset[Tensor]):
    """Batches that take a while to read."""

    def __init__(self, disturber: Disturber, size: int) -> None:
        self.disturber, self.size = disturber, size

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, _index: Any) -> Tensor:
        self.disturber.at("loader", lasts=LOAD_S)
        work(LOAD_S)
        return torch.ones(self.size * ROWS, WIDTH)


class Disk(io.BytesIO):
    """A disk that takes a while."""

    def __init__(self, disturber: Disturber) -> None:
        super().__init__()
        self.disturber = disturber

    def write(self, data: Any) -> int:
        if not self.tell():
            self.disturber.at("save", SAVE_EVERY)
            work(FORWARD_S)
        return super().write(data)


def make_model(style: str, disturber: Disturber) -> nn.Module:
    axes = AXES.get(style, ())
    layers: list[nn.Module] = [Slept(disturber) for _ in range(LAYERS // STAGES if "pp" in axes else LAYERS)]
    if style == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        return fully_shard(nn.Sequential(*(fully_shard(layer, mesh=mesh) for layer in layers)), mesh=mesh)
    if "tp" in axes:
        layers = [Split(layer, mesh_of(*axes).get_group("tp")) for layer in layers]
    whole = nn.Sequential(*layers)
    return DistributedDataParallel(whole) if style == "ddp" else whole


@cache
def mesh_of(*axes: str) -> Any:
    """Return a mesh with two places on each axis."""
    return dist.device_mesh.init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes)


def make_step(style: str, model: nn.Module) -> Callable[[Tensor], None]:
    """Return what does the forward and the backward pass of a batch."""
    if style in ("ddp", "fsdp2"):
        return lambda batch: model(batch).square().mean().backward()
    if style == "tensor":
        return lambda batch: _step_of_shared(model, batch)
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = mesh_of(*AXES[style])
    at = mesh.get_local_rank("pp")
    stage = PipelineStage(model, at, STAGES, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda out, _: out.square().mean())

    def step(batch: Tensor) -> None:
        if at == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=[])
        _averaged(model, mesh)

    return step


def _step_of_shared(model: nn.Module, batch: Tensor) -> None:
    model(batch).square().mean().backward()
    _averaged(model, mesh_of(*AXES["tensor"]))


def _averaged(model: nn.Module, mesh: Any) -> None:
    """Sum the gradients of all replicas."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))


def main(traced: Callable[[nn.Module], AbstractContextManager[None]] = lambda _: nullcontext()) -> None:
    """Train. What `traced` returns is around each step."""
    style, last = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    disturber = Disturber(dist.get_rank())
    model = make_model(style, disturber)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    train = make_step(style, model)
    size = MICRO_BATCHES if "pp" in AXES.get(style, ()) else 1
    for step, batch in enumerate(DataLoader(Batches(disturber, size), batch_size=None)):
        with traced(model):
            optimizer.zero_grad()
            train(batch)
            disturber.at("optimizer")
            optimizer.step()
        disturber.collect(5)
        if step % SAVE_EVERY == 0:
            torch.save(model.state_dict(), Disk(disturber))
        if step == last:
            break


if __name__ == "__main__":
    main()
    os._exit(0)
