"""A plain loop with DistributedDataParallel: `torchrun --nproc-per-node 4 plain.py`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, GLOBAL_BATCH, MICRO_BATCH = 40, 24, 2
INPUTS = torch.randn(STEPS * GLOBAL_BATCH, 16, generator=torch.Generator().manual_seed(3))
TARGETS = INPUTS.sum(1, keepdim=True).sin()


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 1))


def train():
    dist.init_process_group("gloo")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    ddp = DistributedDataParallel(model)
    rank, size = dist.get_rank(), GLOBAL_BATCH // dist.get_world_size()
    for step in range(1, STEPS + 1):
        total = 0.0
        first = (step - 1) * GLOBAL_BATCH + rank * size
        for start in range(first, first + size, MICRO_BATCH):
            samples = slice(start, start + MICRO_BATCH)
            ddp.require_backward_grad_sync = samples.stop == first + size
            loss = nn.functional.mse_loss(ddp(INPUTS[samples]), TARGETS[samples]) * MICRO_BATCH / size
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
