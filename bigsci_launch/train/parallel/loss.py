"""Cross-entropy of logits that are split over ranks by vocabulary, without an fp32 copy of them.

The logits are by far the largest activation. They are read in their own format, some rows at a time, in a buffer that
stays in a GPU's cache; what the backward pass needs is computed again there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigsci_launch.train.parallel.tensor import TensorParallel

BUFFER_ELEMENTS = 1 << 23
"""Elements of the fp32 buffer: 32 MiB, which the second-level cache of an A100 or H100 holds."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """This rank's logits as (tokens, columns), of which the first `num_columns` are no padding."""

    logits: Tensor
    num_columns: int

    def largest(self) -> Tensor:
        """Return the largest score of every token here, fp32."""
        if self.num_columns:
            return self.logits[:, : self.num_columns].amax(dim=-1).float()
        return self.logits.new_full((len(self.logits),), torch.finfo(torch.float32).min, dtype=torch.float32)

    def exponentials(self, largest: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield exp(score - largest) of some tokens at a time, fp32; the next one overwrites the last."""
        tokens, columns = self.logits.shape
        step = max(1, min(tokens, BUFFER_ELEMENTS // columns))
        buffer = torch.empty((step, columns), dtype=torch.float32, device=self.logits.device)
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            part = buffer[: rows.stop - rows.start]
            part.copy_(self.logits[rows])
            part[:, self.num_columns :] = torch.finfo(torch.float32).min
            yield rows, part.sub_(largest[rows].unsqueeze(-1)).exp_()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor, num_columns: int, ranks: TensorParallel) -> Tensor:
        shard = _Shard(logits, num_columns)
        largest = shard.largest()
        ranks.all_reduce(largest, dist.ReduceOp.MAX)
        is_elsewhere = (columns < 0) | (columns >= logits.shape[-1])
        columns = columns.masked_fill(is_elsewhere, 0).unsqueeze(-1)
        target = logits.gather(-1, columns).squeeze(-1).float()
        target = target.sub_(largest).masked_fill_(is_elsewhere, 0.0)
        totals = torch.empty_like(largest)
        for rows, exponentials in shard.exponentials(largest):
            totals[rows] = exponentials.sum(dim=-1)
        sums = torch.stack([totals, target])
        ranks.all_reduce(sums)
        ctx.save_for_backward(logits, largest, sums[0], columns, is_elsewhere)
        ctx.num_columns = num_columns
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        logits, largest, totals, columns, is_elsewhere = ctx.saved_tensors
        upstream = gradients[0].unsqueeze(-1)
        here = (~is_elsewhere).float().unsqueeze(-1)
        gradient = torch.empty_like(logits)
        for rows, part in _Shard(logits, ctx.num_columns).exponentials(largest):
            part.div_(totals[rows].unsqueeze(-1))
            # One column of each row: in this form the operation has a fixed order on a GPU as well.
            part.scatter_(-1, columns[rows], part.gather(-1, columns[rows]) - here[rows])
            gradient[rows] = part.mul_(upstream[rows])
        return gradient, None, None, None


@dataclass(frozen=True, slots=True)
class VocabularyParallelLoss:
    """Mean cross-entropy of logits split over ranks by vocabulary; never gathers the logits, never counts padding."""

    vocab_size: int
    ranks: TensorParallel

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits (batch, length, padded vocabulary / tp) and labels (batch, length) -> a scalar, in fp32."""
        width = logits.shape[-1]
        first_token = self.ranks.rank * width
        num_columns = max(0, min(width, self.vocab_size - first_token))
        columns = (labels - first_token).reshape(-1)
        losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits.reshape(-1, width), columns, num_columns, self.ranks
        )
        return losses.mean()
