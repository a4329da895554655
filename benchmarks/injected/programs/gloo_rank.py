"""A rank that reduces a tensor over gloo every 0.3 s: python gloo_rank.py [timeout=S] [RANK@STEP=leave|load] ...

`leave` ends with 0, as after a data set that is used up sooner than on others. `load` waits for data that do not come.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def next_batch(step: int, plan: dict[tuple[int, int], str]) -> torch.Tensor:
    action = plan.get((dist.get_rank(), step))
    if action == "leave":
        sys.exit(0)
    if action == "load":
        time.sleep(3600)
    time.sleep(0.3)
    return torch.ones(4)


def main() -> None:
    words = dict(word.partition("=")[::2] for word in sys.argv[1:])
    timeout = timedelta(seconds=float(words.pop("timeout", "60")))
    plan = {(int(key.partition("@")[0]), int(key.partition("@")[2])): value for key, value in words.items()}
    dist.init_process_group("gloo", timeout=timeout)
    for step in range(10**6):
        batch = next_batch(step, plan)
        dist.all_reduce(batch)
        print("iteration", step, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
