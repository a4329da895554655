"""A rank that trains with its ring in every other pair of steps, and prints the CPU seconds of its thread in each step.

`stepper.py STYLE STEPS`: `ddp` averages the gradients, or `hand`, by an `all_reduce` for each of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 192, 4, 4, 64, 8


def make_model() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


class Switch:
    """Takes the ring from all wrappers, and gives it back. What is left of them without it is a call and a look-up."""

    def __init__(self) -> None:
        self._hook: Any = sys.modules["ring_hook"]
        self._ring, self._lanes = self._hook.opened(), dict(self._hook._lanes)

    def turn(self, *, on: bool) -> None:
        self._hook._state.update(ring=self._ring if on else None, is_off=not on)
        self._hook._lanes.update(self._lanes if on else dict.fromkeys(self._lanes))

    @property
    def records(self) -> int:
        return sum(lane.count for lane in self._lanes.values() if lane is not None)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    style, model = sys.argv[1], make_model()
    whole = DistributedDataParallel(model) if style == "ddp" else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    batches = iter(DataLoader([torch.randn(LENGTH, WIDTH)] * (1 << 20), batch_size=BATCH))

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        whole(batch).square().mean().backward()
        for parameter in model.parameters() if style == "hand" else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()

    for _ in range(4):
        step(next(batches))
    switch, seconds = Switch(), []
    first = switch.records
    for number in range(int(sys.argv[2])):
        switch.turn(on=number % 4 in (0, 3))
        began = time.thread_time()
        step(next(batches))
        seconds.append(time.thread_time() - began)
    print(json.dumps({"seconds": seconds, "records": switch.records - first}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
