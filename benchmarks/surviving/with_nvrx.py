"""The loop of plain.py under NVIDIA's in-process restart, with a checkpoint after each step. For survivor_peers.py."""

import os
import time
from datetime import timedelta
from pathlib import Path

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks
from plain import GLOBAL_BATCH, INPUTS, STEPS, TARGETS, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PAUSE_S = float(os.environ["PAUSE_S"])
CHECKPOINT = Path("checkpoint.pt")
SHORT = timedelta(seconds=0.5)


@inprocess.Wrapper(
    rank_assignment=inprocess.Compose(MaxActiveWorldSize(int(os.environ["ACTIVE"])), ShiftRanks()),
    monitor_thread_interval=SHORT,
    monitor_process_interval=SHORT,
    heartbeat_interval=SHORT,
    heartbeat_timeout=timedelta(seconds=float(os.environ["HEARTBEAT_TIMEOUT_S"])),
)
def train(call_wrapper: inprocess.CallWrapper = None):
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, multi_tenant=True,
                          is_master=int(os.environ["RANK"]) == 0, wait_for_workers=True)  # fmt: skip
    store = dist.PrefixStore(str(call_wrapper.iteration), store)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=5))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    ddp, size = DistributedDataParallel(model), GLOBAL_BATCH // ranks
    while True:
        began = time.time()
        time.sleep(PAUSE_S)
        step += 1
        first = (step - 1) % STEPS * GLOBAL_BATCH + rank * size
        loss = nn.functional.mse_loss(ddp(INPUTS[first : first + size]), TARGETS[first : first + size])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "new.pt")
            Path("new.pt").replace(CHECKPOINT)
        call_wrapper.ping()
        print(f"step {step} loss {loss.item():.9f} from {began} to {time.time()}", flush=True)


if __name__ == "__main__":
    train()
