"""The loop of plain.py, which survives lost ranks under `bsl submit` with `survive: {in_place: true}`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigsci_launch.train.survivor import Survivor

STEPS, GLOBAL_BATCH, MICRO_BATCH = 40, 24, 2
INPUTS = torch.randn(STEPS * GLOBAL_BATCH, 16, generator=torch.Generator().manual_seed(3))
TARGETS = INPUTS.sum(1, keepdim=True).sin()


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 1))


def train(survivor):
    dist.init_process_group("gloo")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    survivor.keep({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    ddp = DistributedDataParallel(model)
    for step in survivor.steps(STEPS):
        total = 0.0
        for micro_batch in step:
            samples = micro_batch.samples
            ddp.require_backward_grad_sync = micro_batch.is_last
            loss = nn.functional.mse_loss(ddp(INPUTS[samples]), TARGETS[samples]) * micro_batch.weight
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
