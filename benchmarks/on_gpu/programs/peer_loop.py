"""Trains a GPT on one device in a plain PyTorch loop: bf16 weights, and in fp32 their masters and their gradients.

That is how `bsl train` keeps them. Phase `peer` starts this program; `peer_gpt.py` says how they talk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from on_gpu.programs.peer_gpt import (
    BETAS,
    DECAY,
    LARGEST_NORM,
    RATE,
    SEED,
    PlainGpt,
    Work,
    draw_tokens,
    print_step,
)


class Masters:
    """fp32 copies of bf16 weights. A gradient is added to that of its master as soon as it is there, and dropped."""

    def __init__(self, model: nn.Module) -> None:
        self._masters = [nn.Parameter(each.detach().clone()) for each in model.parameters()]
        model.bfloat16()
        self._weights = list(model.parameters())
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(_adder(master))
        matrices, vectors = ([each for each in self._masters if (each.ndim > 1) == wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update the masters, and copy them to the weights."""
        nn.utils.clip_grad_norm_(self._masters, LARGEST_NORM)
        self._optimizer.step()
        torch._foreach_copy_(self._weights, self._masters)
        self._optimizer.zero_grad(set_to_none=False)


def _adder(master: nn.Parameter) -> Callable[[Tensor], None]:
    def add(weight: Tensor) -> None:
        assert master.grad is not None
        master.grad.add_(weight.grad)
        weight.grad = None

    return add


def build(work: Work) -> tuple[PlainGpt, Masters]:
    """Return the model on its device, its layers compiled if that is wanted, and its masters."""
    torch.manual_seed(SEED)
    with torch.device("meta"):
        model = PlainGpt(work)
    model.to_empty(device=work.device)
    model.init_weights()
    masters = Masters(model)
    if work.backend:
        for layer in model.layers.values():
            layer.compile(backend=work.backend, fullgraph=True)
    return model, masters


def losses(work: Work, model: PlainGpt, samples: Tensor) -> Iterator[Tensor]:
    """Run the micro batches of a step forward and backward; yield their parts of the mean loss."""
    for batch in samples.split(work.micro_batch):
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()) / work.micro_batches
        del logits
        loss.backward()
        yield loss.detach()


def memory(device: str) -> Sequence[float | None]:
    """Return the peaks of torch's tensors and of its pool, GiB; None on a CPU."""
    if device != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30


def main() -> None:
    work = Work.of_arguments()
    model, masters = build(work)
    samples = draw_tokens(work).to(work.device)
    for step in range(1, work.steps + 1):
        began = time.perf_counter()
        parts = list(losses(work, model, samples))
        masters.step()
        # Reading the loss waits for all that the device has been given.
        loss = torch.stack(parts).sum().item()
        seconds = time.perf_counter() - began
        allocated, reserved = memory(work.device)
        print_step(step, loss, seconds, allocated_gib=allocated, reserved_gib=reserved)


if __name__ == "__main__":
    main()
