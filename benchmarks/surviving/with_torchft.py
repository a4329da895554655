"""The loop of plain.py under torchft: each rank is a replica group. For survivor_peers.py."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from plain import GLOBAL_BATCH, INPUTS, MICRO_BATCH, STEPS, TARGETS, make_model
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

PAUSE_S = float(os.environ["PAUSE_S"])


def train():
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"loop_{os.environ['RANK']}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while True:
        began = time.time()
        time.sleep(PAUSE_S)
        optimizer.zero_grad()
        step, rank, ranks = manager.current_step(), manager.participating_rank() or 0, manager.num_participants()
        size = GLOBAL_BATCH // max(1, ranks) // MICRO_BATCH * MICRO_BATCH
        first = step % STEPS * GLOBAL_BATCH + rank * size
        loss = nn.functional.mse_loss(ddp(INPUTS[first : first + size]), TARGETS[first : first + size])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if manager.current_step() > step:
            print(f"step {manager.current_step()} loss {loss.item():.9f} from {began} to {time.time()}", flush=True)


if __name__ == "__main__":
    train()
