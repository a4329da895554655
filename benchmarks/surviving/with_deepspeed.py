"""The loop of plain_deepspeed.py, which survives lost ranks."""

import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from bigsci_launch.train.survivor import Survivor

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


def train(survivor):
    deepspeed.init_distributed("gloo")
    engine = make_engine()
    survivor.keep({"engine": engine})
    for step in survivor.steps(STEPS):
        total = 0.0
        for micro_batch in step:
            samples = micro_batch.samples
            loss = nn.functional.mse_loss(engine(INPUTS[samples]), TARGETS[samples])
            engine.backward(loss)
            total += loss.item() * micro_batch.weight
            if not micro_batch.is_last:
                engine.step()
        with step.update(total):
            engine.step()
        if dist.get_rank() == 0:
            print(f"step {step.number} loss {step.loss:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    Survivor(global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH).run(train)
