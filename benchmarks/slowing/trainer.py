"""Programs of another shape than those that the rules were made with. Arguments: `trainer` or `mesh`, the last step.

`trainer` is a loop as of a library: it accumulates the gradients of micro-batches under DDP, averages the loss of all
ranks, clips, steps a schedule, evaluates from time to time, and its first rank alone saves. `mesh` has FSDP2 over
replicas, and a group of two ranks each that share the heads and the hidden width of each block.
"""

from __future__ import annotations

import io
import os
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from disturb import Disturber
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from slowing.foreign import work

WIDTH, LENGTH, BLOCKS, VOCABULARY = 64, 16, 2, 128
ATTENTION_S, MLP_S, TOKENIZE_S, EVALUATE_S, SAVE_S = 0.003, 0.004, 0.0015, 0.01, 0.02
BATCH, EVALUATE_EVERY, SAVE_EVERY = 4, 10, 12
ACCUMULATED = {"trainer": 4, "mesh": 2}


class OnDevice(torch.autograd.Function):
    """Takes its time in both directions, as kernels on a device do."""

    @staticmethod
    def forward(context: Any, values: Tensor, seconds: float, disturber: Disturber) -> Tensor:
        context.seconds, context.disturber = seconds, disturber
        disturber.at("forward", lasts=seconds)
        work(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        context.disturber.at("backward", lasts=2 * context.seconds)
        work(2 * context.seconds)
        return gradients[0], None, None


class InGroup(torch.autograd.Function):
    """The same for all ranks of a group in forward, and the sum of what they have in backward; or the other way."""

    @staticmethod
    def forward(context: Any, values: Tensor, group: Any, sums: bool) -> Tensor:
        context.group, context.sums = group, sums
        if sums and group is not None:
            dist.all_reduce(values := values.clone(), group=group)
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0]
        if not context.sums and context.group is not None:
            dist.all_reduce(gradient := gradient.clone(), group=context.group)
        return gradient, None, None


class Block(nn.Module):
    """Attention and an MLP. The ranks of `group` share both: one sum after each of them, in each direction."""

    def __init__(self, disturber: Disturber, group: Any) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.disturber, self.group = disturber, group

    def forward(self, values: Tensor) -> Tensor:
        values = values + self._shared(self.first(values), self._attention, ATTENTION_S)
        return values + self._shared(self.second(values), self._mlp, MLP_S)

    def _shared(self, values: Tensor, part: Any, seconds: float) -> Tensor:
        inside = OnDevice.apply(InGroup.apply(values, self.group, False), seconds, self.disturber)
        out: Tensor = InGroup.apply(part(inside), self.group, True)
        return out

    def _attention(self, values: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.query_key_value(values).chunk(3, -1)]
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _mlp(self, values: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(values)))
        return out


class Language(nn.Module):
    def __init__(self, disturber: Disturber, group: Any = None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block(disturber, group) for _ in range(BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            values = block(values)
        return functional.cross_entropy(self.head(values).flatten(0, 1), tokens[:, 1:].flatten())


class Texts(Dataset[str]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, at: int) -> str:
        return chr(32 + at % 90) * (LENGTH + 1)


class Collator:
    """Makes tokens of texts, which takes a while for each."""

    def __init__(self, disturber: Disturber) -> None:
        self.disturber = disturber

    def __call__(self, texts: list[str]) -> Tensor:
        self.disturber.at("loader", lasts=TOKENIZE_S)
        work(TOKENIZE_S)
        return torch.tensor([[ord(letter) for letter in text] for text in texts])


class Trainer:
    """Trains with accumulated gradients."""

    def __init__(self, shape: str, disturber: Disturber) -> None:
        self.disturber, self.shape = disturber, shape
        self.model = _meshed(disturber) if shape == "mesh" else _replicated(disturber)
        self.accumulated = ACCUMULATED[shape]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, foreach=False)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 100))
        self.batches = iter(DataLoader(Texts(), batch_size=BATCH, collate_fn=Collator(disturber)))

    def train(self, last: int) -> None:
        for step in range(last + 1):
            loss = torch.zeros(())
            for number in range(self.accumulated):
                loss += self._micro_batch(next(self.batches), is_last=number == self.accumulated - 1)
            dist.all_reduce(loss)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.disturber.collect(5)
            if step % EVALUATE_EVERY == 0:
                self._evaluate()
            if step % SAVE_EVERY == 0 and dist.get_rank() == 0 and self.shape == "trainer":
                torch.save(self.model.state_dict(), io.BytesIO())
                time.sleep(SAVE_S)

    def _micro_batch(self, tokens: Tensor, *, is_last: bool) -> Tensor:
        apart = isinstance(self.model, DistributedDataParallel) and not is_last
        with self.model.no_sync() if apart else nullcontext():  # type: ignore[operator]
            loss: Tensor = self.model(tokens) / self.accumulated
            loss.backward()
        return loss.detach()

    @torch.no_grad()
    def _evaluate(self) -> None:
        loss = self.model(torch.ones(BATCH, LENGTH + 1, dtype=torch.long))
        time.sleep(EVALUATE_S)
        dist.all_reduce(loss)


def _replicated(disturber: Disturber) -> nn.Module:
    return DistributedDataParallel(Language(disturber))


def _meshed(disturber: Disturber) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Language(disturber, mesh.get_group("tp"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer(sys.argv[1], Disturber(dist.get_rank())).train(int(sys.argv[2]))


if __name__ == "__main__":
    main()
    os._exit(0)
