"""A plain loop with DistributedDataParallel, and the guards in it: `torchrun --nproc-per-node 2 ddp.py`."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from small import AT, batches, is_victim, make_model, options, spoil_moments, spoil_settings, spoil_weights
from torch.nn.parallel import DistributedDataParallel

from bigsci_launch.train.attach import Guards


def train(arguments):
    dist.init_process_group("gloo")
    rank, defect = dist.get_rank(), arguments.defect
    module = make_model()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    tied = [("embedding.weight", "head.weight")]
    guards = Guards(model, optimizer, interval=arguments.interval, events=arguments.events, tied=tied, fresh_data=100)
    for step, tokens in batches(arguments.steps, rank, defect):
        guards.batch(tokens)
        spoil_weights(model, defect, step)
        # no_sync leaves the reduction out, as a wrong condition for gradient accumulation does.
        kept_apart = model.no_sync() if defect == "unreduced" and step >= AT else nullcontext()
        with kept_apart, torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16):
            loss = model(tokens)
            loss.backward()
        spoil_moments(optimizer, defect, step)
        spoil_settings(optimizer, defect, step)
        if defect == "scaled" and step >= AT:
            for parameter in model.parameters():
                parameter.grad *= 8
        guards.gradients()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if is_victim(defect, "untied", step):
            module.embedding.weight = torch.nn.Parameter(module.embedding.weight.detach() + 0.01)
        optimizer.step()
        optimizer.zero_grad()
        guards.step(loss, norm=norm)
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}", flush=True)
    guards.before_save()
    guards.end()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(options())
