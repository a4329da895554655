"""One rank of a loop that computes, and saves its state with torch's asynchronous checkpoint after every second step.

    python async_save.py FOLDER BYTES STEPS SECONDS

Prints the moment at which each step ended, on rank 0.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save


def main() -> None:
    folder, num_bytes, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {f"state of rank {rank}": torch.randn(num_bytes // 4)}
    products = _products_in(seconds)
    moments, pending = [time.time()], None
    for step in range(1, steps + 1):
        for _ in range(products):
            torch.mm(MATRIX, MATRIX)
        if pending is not None:
            pending.result()
            pending = None
        dist.all_reduce(torch.ones(1))
        moments.append(time.time())
        if step % 2 == 0:
            pending = async_save(state, checkpoint_id=str(folder / f"step{step}"))
    if rank == 0:
        print(*moments)
    dist.destroy_process_group()


MATRIX = torch.randn(512, 512)


def _products_in(seconds: float) -> int:
    """Return how many matrix products take that long, the same on all ranks."""
    dist.barrier()
    started = time.time()
    for _ in range(40):
        torch.mm(MATRIX, MATRIX)
    count = torch.tensor([int(seconds * 40 / (time.time() - started))])
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    return max(1, int(count))


if __name__ == "__main__":
    main()
