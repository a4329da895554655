"""A loop with DeepSpeed's plain engine and ZeRO stage 1, and the guards in it."""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from small import AT, BATCH, batches, leave, make_model, options, spoil_moments, spoil_settings, spoil_weights

from bigsci_launch.train.attach import Guards


def settings(arguments):
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": arguments.bf16},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }


def train(arguments):
    deepspeed.init_distributed("gloo")
    rank, defect = dist.get_rank(), arguments.defect
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(arguments))
    guards = Guards(
        engine,
        optimizer,
        interval=arguments.interval,
        events=arguments.events,
        gradient=safe_get_full_grad,
        fresh_data=100,
    )
    for step, tokens in batches(arguments.steps, rank, defect):
        guards.batch(tokens)
        spoil_weights(engine, defect, step)
        if defect == "unreduced" and step == AT:
            optimizer.average_tensor = lambda *args, **kwargs: None
        loss = engine(tokens)
        engine.backward(loss)
        spoil_moments(optimizer.optimizer, defect, step)
        spoil_settings(optimizer.optimizer, defect, step)
        guards.gradients()
        engine.step()
        guards.step(loss, norm=engine.get_global_grad_norm())
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}", flush=True)
    guards.before_save()
    guards.end()
    dist.destroy_process_group()


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes minutes to compile
    train(options())
    leave()
