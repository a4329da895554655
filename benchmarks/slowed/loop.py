"""A data-parallel loop on gloo that is slowed down on one rank: `torchrun --nproc-per-node 4 loop.py KIND SHARE ...`.

It knows nothing of bsl. A step waits as for a device (sleeps) and computes a little. It is measured undisturbed first;
then rank SLOW takes SHARE of that longer in each step, by KIND: loader, forward, backward, optimizer, gc or quota (a
cgroup that the benchmark makes; then the file QUOTA.pid is written and the loop waits for QUOTA.ready). Each rank
writes the seconds of its steps, before and after, and how many were added to each, to OUT.RANK.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from pathlib import Path

with contextlib.suppress(OSError):  # each rank is a session of its own, and the kernel weighs those
    Path("/proc/self/autogroup").write_text(os.environ.get("RANKS_NICE", "0"))

import torch  # it takes seconds
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

KIND, SHARE, SLOW, STYLE, OUT, SECONDS = (
    *sys.argv[1:2],
    float(sys.argv[2]),
    int(sys.argv[3]),
    *sys.argv[4:6],
    float(sys.argv[6]),
)
WARM, MEASURED = 10, 40
WIDTH, BATCH, DEVICE_S = 256, 16, 0.02
extra: dict[str, float] = {}
spent = [0.0]
"""Seconds that were added to all steps so far."""


def compute(seconds: float) -> None:
    """Compute for so much time on a core."""
    began, numbers, end = time.perf_counter(), torch.ones(64, 64), time.thread_time() + seconds
    while seconds and time.thread_time() < end:
        numbers @ numbers
    spent[0] += time.perf_counter() - began if seconds else 0.0


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given.clone()

    @staticmethod
    def backward(ctx, given):
        compute(extra.get("backward", 0.0))
        return given


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        time.sleep(DEVICE_S)
        compute(extra.get("forward", 0.0))
        return self.second(SlowBackward.apply(torch.relu(self.first(given))))


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1 << 24

    def __getitem__(self, index):
        time.sleep(0.004 / BATCH)
        began = time.perf_counter()
        time.sleep(extra.get("loader", 0.0) / BATCH)
        spent[0] += time.perf_counter() - began if "loader" in extra else 0.0
        return torch.randn(WIDTH)


class SlowAdam(torch.optim.AdamW):
    def step(self, closure=None):
        compute(extra.get("optimizer", 0.0))
        return super().step(closure)


def parallel(model: nn.Module) -> nn.Module:
    if STYLE == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    return DistributedDataParallel(model) if STYLE == "ddp" else model


def reduce_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss = model(batch).square().mean()
    loss.backward()
    if STYLE == "manual":
        reduce_by_hand(model)
    optimizer.step()
    optimizer.zero_grad()
    if extra.get("gc"):
        began = time.perf_counter()
        gc.collect()
        spent[0] += time.perf_counter() - began


def train() -> None:
    model = parallel(Block())
    optimizer = SlowAdam(model.parameters(), lr=1e-4)
    loader = iter(torch.utils.data.DataLoader(Samples(), batch_size=BATCH))
    times, cpu_began = [], 0.0
    while len(times) < WARM + MEASURED:
        times.append(timed(model, optimizer, loader))
        cpu_began = cpu_began if len(times) != WARM else time.process_time()
    usual = torch.tensor([sum(times[WARM:]) / MEASURED])
    dist.all_reduce(usual, op=dist.ReduceOp.MAX)
    heap = disturb(usual.item(), (time.process_time() - cpu_began) / MEASURED)
    dist.barrier()
    after, began = [], time.monotonic()
    Path(f"{OUT}.{dist.get_rank()}.begun").touch()
    is_over = torch.zeros(1)
    while not is_over.item():
        after.append(timed(model, optimizer, loader))
        is_over[0] = time.monotonic() - began > SECONDS
        dist.all_reduce(is_over, op=dist.ReduceOp.MAX)
        Path(f"{OUT}.{dist.get_rank()}").write_text(
            json.dumps({"before": usual.item(), "after": after[2:], "spent": spent[0] / len(after)})
        )
    del heap


def timed(model, optimizer, loader) -> float:
    began = time.perf_counter()
    step_on(model, optimizer, next(loader))
    return time.perf_counter() - began


def disturb(usual_s: float, cpu_s: float) -> list:
    """Slow this rank down if it is the one."""
    if dist.get_rank() != SLOW or KIND == "none":
        return []
    if KIND == "gc":
        extra["gc"] = 1.0
        return heap_of(SHARE * usual_s)
    if KIND == "quota":
        Path(f"{OUT}.pid").write_text(f"{os.getpid()} {cpu_s / (usual_s * (1 + SHARE))}")
        while not Path(f"{OUT}.ready").exists():
            time.sleep(0.05)
        return []
    extra[KIND] = SHARE * usual_s
    return []


def heap_of(seconds: float) -> list:
    """Return objects that take the collector so long."""
    heap: list = []
    while True:
        began = time.thread_time()
        gc.collect()
        if time.thread_time() - began >= seconds:
            return heap
        heap.extend([[] for _ in range(20000)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
