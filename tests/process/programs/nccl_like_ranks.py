"""One of two ranks over `tests/support/nccl_like`; rank 1 does not take part in the last collective.

    python nccl_like_ranks.py abort|watchdog|communicator

Rank 0 prints what became of it: how long the call of the collective took, and what ended its wait, after how long.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "support" / "nccl_like"))

import nccl_like

from bigsci_launch.train.survive.blocked import end_blocked_communication

CASE = sys.argv[1]
AWAY_S, ABORT_S = 6.0, 1.0


def main() -> None:
    nccl_like.install()
    dist.init_process_group(nccl_like.NAME, timeout=timedelta(seconds=2 if CASE == "watchdog" else 60))
    rank, values = dist.get_rank(), torch.ones(4)
    if CASE != "communicator":
        dist.all_reduce(values)
        assert values.sum().item() == 8
    dist.new_group(backend="gloo").barrier().wait()
    if rank == 1:
        time.sleep(AWAY_S)
        os._exit(0)
    if CASE != "watchdog":
        threading.Timer(ABORT_S, end_blocked_communication).start()
    started = time.monotonic()
    dist.all_reduce(values)
    print(f"returned after {time.monotonic() - started:.3f} s", flush=True)
    total = values.sum().item()
    print(f"ended after {time.monotonic() - started:.1f} s with {total}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
