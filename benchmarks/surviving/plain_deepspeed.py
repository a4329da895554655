"""A plain loop with DeepSpeed's ZeRO, stage 1 or STAGE: `torchrun --nproc-per-node 4 plain_deepspeed.py`."""

import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

STEPS, GLOBAL_BATCH, MICRO_BATCH = 40, 24, 2
INPUTS = torch.randn(STEPS * GLOBAL_BATCH, 16, generator=torch.Generator().manual_seed(3))
TARGETS = INPUTS.sum(1, keepdim=True).sin()


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 1))


def make_engine():
    stage = int(os.environ.get("STAGE", "1"))
    model, config = make_model(), {"gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    config |= {"train_batch_size": GLOBAL_BATCH, "train_micro_batch_size_per_gpu": MICRO_BATCH}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    config |= {"zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def train():
    deepspeed.init_distributed("gloo")
    engine = make_engine()
    rank, size = dist.get_rank(), GLOBAL_BATCH // dist.get_world_size()
    for step in range(1, STEPS + 1):
        total = 0.0
        first = (step - 1) * GLOBAL_BATCH + rank * size
        for start in range(first, first + size, MICRO_BATCH):
            samples = slice(start, start + MICRO_BATCH)
            loss = nn.functional.mse_loss(engine(INPUTS[samples]), TARGETS[samples])
            engine.backward(loss)
            total += loss.item() * MICRO_BATCH / size
            engine.step()
        if rank == 0:
            print(f"step {step} loss {total:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
