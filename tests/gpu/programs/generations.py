"""One rank that forms its groups, has them aborted from another thread, and forms them again: `generations.py BACKEND`.

Prints a line for each generation: the seconds of the abort, and of forgetting the groups.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from bigsci_launch.train.survive.blocked import end_blocked_communication
from bigsci_launch.train.survive.teardown import tear_down

GENERATIONS, LIMIT = 3, timedelta(seconds=60)
CYCLES = 2_000_000_000
"""Of a GPU's clock, about a second: the collective waits behind them."""


def main() -> None:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    for generation in range(GENERATIONS):
        live(sys.argv[1], generation)


def live(backend: str, generation: int) -> None:
    on_gpu = backend == "nccl"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)
    dist.new_group(backend="gloo")
    smaller = dist.new_group([0])
    values = torch.full((4,), 2.0, device=device)
    for group in (None, smaller):
        dist.all_reduce(values, group=group)
    assert values.sum().item() == 8
    if on_gpu:
        torch.cuda._sleep(CYCLES)
    dist.all_reduce(values, group=smaller)
    started = time.monotonic()
    thread = threading.Thread(target=end_blocked_communication)
    thread.start()
    thread.join()
    aborted = time.monotonic()
    tear_down(None)
    assert not dist.is_initialized()
    print(f"generation {generation}: {aborted - started:.2f} s, {time.monotonic() - aborted:.2f} s", flush=True)


if __name__ == "__main__":
    main()
