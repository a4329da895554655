"""Contrastive training: embeddings of all ranks are gathered by torch.distributed.nn, so gradients travel back.

python -m torch.distributed.run --nproc-per-node 4 pairs_of_views.py CULPRIT

The culprit freezes its encoder at step 4: nothing travels back from there, and it comes to the averaging alone.
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from diary import note
from torch import nn


def contrast(encoder, frozen):
    views = encoder(torch.randn(4, 24))
    if frozen:
        views = views.detach()
    everyone = torch.cat(with_gradients.all_gather(views))
    likeness = nn.functional.normalize(views) @ nn.functional.normalize(everyone).T
    return nn.functional.cross_entropy(likeness, torch.arange(4))


def average(encoder, group):
    for weights in encoder.parameters():
        if weights.grad is None:
            weights.grad = torch.zeros_like(weights)
        dist.all_reduce(weights.grad, group=group)


def main():
    culprit = int(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    group = dist.new_group()
    encoder = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 16))
    optimizer = torch.optim.Adam(encoder.parameters())
    for step in range(100_000):
        frozen = rank == culprit and step == 4
        if frozen:
            note("struck", rank)
        loss = contrast(encoder, frozen)
        if loss.requires_grad:
            loss.backward()
        average(encoder, group)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        time.sleep(0.1)
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
