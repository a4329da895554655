"""The loop of plain_accelerate.py, which survives lost ranks."""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import nn

from bigsci_launch.train.survivor import Survivor

STEPS, GLOBAL_BATCH, MICRO_BATCH = 40, 24, 2
INPUTS = torch.randn(STEPS * GLOBAL_BATCH, 16, generator=torch.Generator().manual_seed(3))
TARGETS = INPUTS.sum(1, keepdim=True).sin()


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 1))


def train(survivor):
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    survivor.keep({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    ddp, prepared = accelerator.prepare(model, optimizer)
    for step in survivor.steps(STEPS):
        total = 0.0
        for micro_batch in step:
            samples = micro_batch.samples
            with nullcontext() if micro_batch.is_last else accelerator.no_sync(ddp):
                loss = nn.functional.mse_loss(ddp(INPUTS[samples]), TARGETS[samples]) * micro_batch.weight
                accelerator.backward(loss)
            total += loss.item()
        accelerator.clip_grad_norm_(ddp.parameters(), 1.0)
        with step.update(total):
            prepared.step()
            scheduler.step()
        prepared.zero_grad()
        if accelerator.is_main_process:
            print(f"step {step.number} loss {step.loss:.9f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    Survivor(global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH).run(train)
