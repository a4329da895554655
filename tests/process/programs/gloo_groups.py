"""One rank of a small training on gloo in which the last rank leaves early, with the world as its only group or not.

    RANK=.. WORLD_SIZE=.. MASTER_ADDR=.. MASTER_PORT=.. python gloo_groups.py CASE READY_FIFO

CASE: `world`; or `pair`, in which ranks 0 and 1 have a group of their own, too.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

CASE, READY = sys.argv[1:]
FAR = timedelta(seconds=300)

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=FAR)
if CASE == "pair":
    dist.new_group([0, 1], timeout=FAR)
x = torch.ones(8)
dist.all_reduce(x)
with Path(READY).open("w") as fifo:
    fifo.write(f"{os.environ['RANK']}\n")
if int(os.environ["RANK"]) == dist.get_world_size() - 1:
    dist.barrier()
dist.all_reduce(x)
