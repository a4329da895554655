"""Cross-entropy of logits that are split over ranks by vocabulary, without an fp32 copy of them.

The logits are by far the largest activation. They are read in their own format, some rows at a time, in a buffer that
stays in a GPU's cache; what the backward pass needs is computed again there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigsci_launch.train.device import compiler
from bigsci_launch.train.parallel.tensor import TensorParallel

BUFFER_ELEMENTS = 1 << 23
"""Elements of the fp32 buffer: 32 MiB, which the second-level cache of an A100 or H100 holds."""


@dataclass(frozen=True, slots=True)
class LossKernels:
    """How rows of logits (tokens, columns) are read, of which the first `num_columns` are no padding.

    `totals(logits, largest, num_columns)` returns the sum of exp(score - largest) of every token, fp32.
    `gradients(logits, largest, totals, columns, here, upstream, num_columns)` returns the gradient of the logits in
    their own format. `columns` (tokens, 1) are the labels; `here` is 1 where a label is among the columns, else 0.
    """

    totals: Callable[[Tensor, Tensor, int], Tensor]
    gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]


def _largest(logits: Tensor, num_columns: int) -> Tensor:
    """Return the largest score of every token here, fp32."""
    if num_columns:
        return logits[:, :num_columns].amax(dim=-1).float()
    return logits.new_full((len(logits),), torch.finfo(torch.float32).min, dtype=torch.float32)


def _exponentials(logits: Tensor, largest: Tensor, num_columns: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield exp(score - largest) of some tokens at a time, fp32; the next one overwrites the last."""
    tokens, columns = logits.shape
    step = max(1, min(tokens, BUFFER_ELEMENTS // columns))
    buffer = torch.empty((step, columns), dtype=torch.float32, device=logits.device)
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        part = buffer[: rows.stop - rows.start]
        part.copy_(logits[rows])
        part[:, num_columns:] = torch.finfo(torch.float32).min
        yield rows, part.sub_(largest[rows].unsqueeze(-1)).exp_()


def _totals_in_parts(logits: Tensor, largest: Tensor, num_columns: int) -> Tensor:
    totals = torch.empty_like(largest)
    for rows, exponentials in _exponentials(logits, largest, num_columns):
        totals[rows] = exponentials.sum(dim=-1)
    return totals


def _gradients_in_parts(
    logits: Tensor, largest: Tensor, totals: Tensor, columns: Tensor, here: Tensor, upstream: Tensor, num_columns: int
) -> Tensor:
    gradient = torch.empty_like(logits)
    for rows, part in _exponentials(logits, largest, num_columns):
        part.div_(totals[rows].unsqueeze(-1))
        # One column of each row: in this form the operation has a fixed order on a GPU as well.
        part.scatter_(-1, columns[rows], part.gather(-1, columns[rows]) - here[rows].unsqueeze(-1))
        gradient[rows] = part.mul_(upstream[rows].unsqueeze(-1))
    return gradient


IN_PARTS = LossKernels(_totals_in_parts, _gradients_in_parts)


def _totals(logits: Tensor, largest: Tensor, num_columns: int) -> Tensor:
    return (logits[:, :num_columns].float() - largest.unsqueeze(-1)).exp().sum(dim=-1)


def _gradients(
    logits: Tensor, largest: Tensor, totals: Tensor, columns: Tensor, here: Tensor, upstream: Tensor, num_columns: int
) -> Tensor:
    places = torch.arange(logits.shape[-1], device=logits.device)
    shares = (logits.float() - largest.unsqueeze(-1)).exp() / totals.unsqueeze(-1)
    labels = (places == columns) * here.unsqueeze(-1)
    gradient = (shares - labels) * upstream.unsqueeze(-1)
    return gradient.masked_fill(places >= num_columns, 0.0).to(logits.dtype)


def compiled_kernels() -> LossKernels:
    """Return kernels that read all logits at once: compiled, each is one kernel, and keeps nothing in between."""
    totals, gradients = (compiler.CompiledFunction(each, "the loss") for each in (_totals, _gradients))
    return LossKernels(totals, gradients)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, columns: Tensor, num_columns: int, ranks: TensorParallel, kernels: LossKernels
    ) -> Tensor:
        largest = _largest(logits, num_columns)
        ranks.all_reduce(largest, dist.ReduceOp.MAX)
        is_elsewhere = (columns < 0) | (columns >= logits.shape[-1])
        columns = columns.masked_fill(is_elsewhere, 0).unsqueeze(-1)
        target = logits.gather(-1, columns).squeeze(-1).float()
        target = target.sub_(largest).masked_fill_(is_elsewhere, 0.0)
        # The compiler asks a tensor that requires a gradient for it, which warns.
        sums = torch.stack([kernels.totals(logits.detach(), largest, num_columns), target])
        ranks.all_reduce(sums)
        ctx.save_for_backward(logits, largest, sums[0], columns, is_elsewhere)
        ctx.num_columns, ctx.kernels = num_columns, kernels
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        logits, largest, totals, columns, is_elsewhere = ctx.saved_tensors
        here = (~is_elsewhere).float()
        found = ctx.kernels.gradients(logits.detach(), largest, totals, columns, here, gradients[0], ctx.num_columns)
        return found, None, None, None, None


@dataclass(frozen=True, slots=True)
class VocabularyParallelLoss:
    """Mean cross-entropy of logits split over ranks by vocabulary; never gathers the logits, never counts padding."""

    vocab_size: int
    ranks: TensorParallel
    kernels: LossKernels = IN_PARTS

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits (batch, length, padded vocabulary / tp) and labels (batch, length) -> a scalar, in fp32."""
        width = logits.shape[-1]
        first_token = self.ranks.rank * width
        num_columns = max(0, min(width, self.vocab_size - first_token))
        columns = (labels - first_token).reshape(-1)
        losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits.reshape(-1, width), columns, num_columns, self.ranks, self.kernels
        )
        return losses.mean()
