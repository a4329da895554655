"""A loop with FSDP2's `fully_shard`, and the guards in it: `torchrun --nproc-per-node 2 fsdp2.py`."""

import torch
import torch.distributed as dist
from small import AT, batches, leave, make_model, options, spoil_moments, spoil_settings, spoil_weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bigsci_launch.train.attach import Guards


def train(arguments):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    rank, defect = dist.get_rank(), arguments.defect
    model = make_model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if arguments.bf16 else None
    kept = {"mp_policy": policy} if policy else {}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **kept)
    fully_shard(model, mesh=mesh, **kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    guards = Guards(
        model, optimizer, groups={"dp": mesh}, interval=arguments.interval, events=arguments.events, fresh_data=100
    )
    for step, tokens in batches(arguments.steps, rank, defect):
        guards.batch(tokens)
        spoil_weights(model, defect, step)
        # Off, FSDP2 keeps the gradients of its own rank to itself.
        model.set_requires_gradient_sync(not (defect == "unreduced" and step >= AT))
        loss = model(tokens)
        loss.backward()
        spoil_moments(optimizer, defect, step)
        spoil_settings(optimizer, defect, step)
        if defect == "scaled" and step >= AT:
            for parameter in model.parameters():
                parameter.grad *= 8
        if defect == "wrong-sum" and step >= AT:
            # A sum that should have been a mean: AdamW hides it.
            for parameter in model.parameters():
                parameter.grad *= dist.get_world_size()
        guards.gradients()
        norm = torch.nn.utils.clip_grad_norm_([each for each in model.parameters() if each.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        guards.step(loss, norm=norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}", flush=True)
    guards.before_save()
    guards.end()
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(options())
    leave()
