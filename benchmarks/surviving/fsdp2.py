"""The loop of plain_fsdp2.py, which survives lost ranks. With REPLICAS=2, HSDP: two groups of ranks have each part."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bigsci_launch.train.survivor import Survivor

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


def train(survivor):
    dist.init_process_group("gloo")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    survivor.keep({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    for step in survivor.steps(STEPS):
        total = 0.0
        for micro_batch in step:
            samples = micro_batch.samples
            model.set_requires_gradient_sync(micro_batch.is_last)
            loss = nn.functional.mse_loss(model(INPUTS[samples]), TARGETS[samples]) * micro_batch.weight
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with step.update(total):
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step.number} loss {step.loss:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    Survivor(global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH).run(train)
