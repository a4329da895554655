"""A loop with Hugging Face accelerate that accumulates gradients, and the guards in it."""

import torch
from accelerate import Accelerator
from small import AT, batches, is_victim, make_model, options, spoil_moments, spoil_settings, spoil_weights

from bigsci_launch.train.attach import Guards

ACCUMULATED = 2


def train(arguments):
    mixed = "bf16" if arguments.bf16 else "no"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, mixed_precision=mixed)
    rank, defect = accelerator.process_index, arguments.defect
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    guards = Guards(model, optimizer, interval=arguments.interval, events=arguments.events, fresh_data=100)
    inner = optimizer.optimizer
    for number, tokens in batches(arguments.steps * ACCUMULATED, rank, defect):
        step = (number + ACCUMULATED - 1) // ACCUMULATED
        guards.batch(tokens)
        with accelerator.accumulate(model):
            if defect == "unreduced" and step >= AT:
                model.require_backward_grad_sync = False
            loss = model(tokens)
            accelerator.backward(loss)
            if not accelerator.sync_gradients:
                continue
            spoil_weights(model, defect, step)
            spoil_moments(inner, defect, step)
            spoil_settings(inner, defect, step)
            if is_victim(defect, "scaled-one", step):
                for parameter in model.parameters():
                    parameter.grad *= 8
            guards.gradients()
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        guards.step(loss, norm=norm)
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}", flush=True)
    guards.before_save()
    guards.end()
    accelerator.end_training()


if __name__ == "__main__":
    train(options())
