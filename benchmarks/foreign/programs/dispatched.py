"""Healthy: accelerate, where process 0 reads all batches from a slow stream and deals them out.

Gradients accumulate over four of them.

accelerate launch dispatched.py
"""

import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from diary import note
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(0.15)
            yield torch.randn(16)


def main():
    dealt = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, dataloader_config=dealt)
    rank = accelerator.process_index
    note("hello", rank)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(Stream(), batch_size=4))
    for step, batch in enumerate(batches):
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
