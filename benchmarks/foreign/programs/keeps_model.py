"""Trains a wide network with DDP; every 20 s rank 0 stores it, and the others wait in the next step."""

import io
import os
import time

import torch
import torch.distributed as dist
from diary import note
from torch.nn.parallel import DistributedDataParallel

SAVE_EVERY_S = 20.0
BLOCK = 1 << 20


def store(network, adam):
    """Write in blocks, as to a file system that many jobs share: about 4 s."""
    whole = io.BytesIO()
    torch.save({"model": network.state_dict(), "optimizer": adam.state_dict()}, whole)
    with open("model.new", "wb") as checkpoint:
        for start in range(0, whole.tell(), BLOCK):
            checkpoint.write(whole.getbuffer()[start : start + BLOCK])
            checkpoint.flush()
            os.fsync(checkpoint.fileno())
            time.sleep(0.08)
    os.replace("model.new", "model.pt")


def train():
    rank = int(os.environ["RANK"])
    note("hello", rank)
    dist.init_process_group("gloo")
    network = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.Linear(2000, 10)))
    adam = torch.optim.Adam(network.parameters())
    step, saved_s = 0, time.monotonic()
    while True:
        network(torch.randn(64, 2000)).square().mean().backward()
        adam.step()
        adam.zero_grad()
        if rank == 0 and time.monotonic() - saved_s >= SAVE_EVERY_S:
            note("saves", rank)
            store(network.module, adam)
            note("saved", rank)
            saved_s = time.monotonic()
        step += 1
        if step < 10 or step % 10 == 0:
            note(f"step {step}", rank)


if __name__ == "__main__":
    train()
