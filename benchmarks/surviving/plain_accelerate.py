"""A plain loop with Accelerate: `torchrun --nproc-per-node 4 plain_accelerate.py`."""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import nn

STEPS, GLOBAL_BATCH, MICRO_BATCH = 40, 24, 2
INPUTS = torch.randn(STEPS * GLOBAL_BATCH, 16, generator=torch.Generator().manual_seed(3))
TARGETS = INPUTS.sum(1, keepdim=True).sin()


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 1))


def train():
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    ddp, prepared = accelerator.prepare(model, optimizer)
    size = GLOBAL_BATCH // accelerator.num_processes
    for step in range(1, STEPS + 1):
        total = 0.0
        first = (step - 1) * GLOBAL_BATCH + accelerator.process_index * size
        for start in range(first, first + size, MICRO_BATCH):
            samples = slice(start, start + MICRO_BATCH)
            with nullcontext() if samples.stop == first + size else accelerator.no_sync(ddp):
                loss = nn.functional.mse_loss(ddp(INPUTS[samples]), TARGETS[samples]) * MICRO_BATCH / size
                accelerator.backward(loss)
            total += loss.item()
        accelerator.clip_grad_norm_(ddp.parameters(), 1.0)
        prepared.step()
        scheduler.step()
        prepared.zero_grad()
        if accelerator.is_main_process:
            print(f"step {step} loss {total:.9f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    train()
