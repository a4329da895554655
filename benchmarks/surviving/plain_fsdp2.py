"""A plain loop with FSDP2: `torchrun --nproc-per-node 4 plain_fsdp2.py`. With REPLICAS=2, HSDP."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, GLOBAL_BATCH, MICRO_BATCH = 40, 24, 2
REPLICAS = int(os.environ.get("REPLICAS", "1"))
INPUTS = torch.randn(STEPS * GLOBAL_BATCH, 16, generator=torch.Generator().manual_seed(3))
TARGETS = INPUTS.sum(1, keepdim=True).sin()


def make_model():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 1))
    sizes = (REPLICAS, dist.get_world_size() // REPLICAS)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards"))
    fully_shard(model[0], mesh=mesh if REPLICAS > 1 else mesh["shards"])
    return fully_shard(model, mesh=mesh if REPLICAS > 1 else mesh["shards"])


def train():
    dist.init_process_group("gloo")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    rank, size = dist.get_rank(), GLOBAL_BATCH // dist.get_world_size()
    for step in range(1, STEPS + 1):
        total = 0.0
        first = (step - 1) * GLOBAL_BATCH + rank * size
        for start in range(first, first + size, MICRO_BATCH):
            samples = slice(start, start + MICRO_BATCH)
            model.set_requires_gradient_sync(samples.stop == first + size)
            loss = nn.functional.mse_loss(model(INPUTS[samples]), TARGETS[samples]) * MICRO_BATCH / size
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {total:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
