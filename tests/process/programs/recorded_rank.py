"""A torch rank that serves no flight recorder: `python recorded_rank.py PLACE FOLDER READY_FIFO`.

It runs five collectives. Then `beat` counts in FOLDER/beat for ever, and `hold_gil` sleeps in C with the GIL held.
FOLDER/nccl_trace_rank_N is torch's own dump.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

PLACE, FOLDER, READY = sys.argv[1:4]
signal.alarm(240)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(5):
    dist.all_reduce(torch.ones(8))
Path(FOLDER, f"nccl_trace_rank_{os.environ['RANK']}").write_bytes(_dump_fr_trace())


def beat() -> None:
    count = 0
    while True:
        time.sleep(0.01)
        count += 1
        Path(FOLDER, "beat.new").write_text(str(count))
        Path(FOLDER, "beat.new").replace(f"{FOLDER}/beat")


def hold_gil() -> None:
    ctypes.PyDLL(None).sleep(120)


with Path(READY).open("w") as fifo:
    fifo.write("ready\n")
globals()[PLACE]()
