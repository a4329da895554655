"""Layers whose weights are split over the tensor-parallel ranks.

Two conjugate functions do all the communication: `copy_to_ranks` (identity forward, sum backward) goes before a
column-parallel layer, `sum_over_ranks` (sum forward, identity backward) after a row-parallel one. Split weights carry
`model_parallel = True`: DeepSpeed counts those on every rank in the gradient norm, and all others once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bigsci_launch.train.parallel.initial_weights import Draw


class TensorParallel:
    """This rank's place among the `size` ranks that split every layer; `group` is None if there is only one."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.size = size
        self.group = group

    def all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `tensor` over the tensor-parallel ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=operation, group=self.group)

    def part(self, size: int) -> slice:
        """Return this rank's part of a dimension of `size` elements.

        Raises:
            ValueError: `size` is not divisible by the number of ranks.
        """
        if size % self.size:
            raise ValueError(f"{size} is not divisible by {self.size} tensor-parallel ranks")
        width = size // self.size
        return slice(self.rank * width, (self.rank + 1) * width)


def make_tensor_parallel(groups: tuple[tuple[int, ...], ...], rank: int) -> TensorParallel:
    """Return the tensor-parallel place of `rank`; a collective call that needs the same `groups` on every rank."""
    mine = None
    for ranks in groups:
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            mine = TensorParallel(ranks.index(rank), len(ranks), group)
    assert mine is not None
    return mine


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        # A copy: the caller's gradient may be shared with the residual branch.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.ranks.all_reduce(total)
        return total, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorParallel) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        ranks.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


def copy_to_ranks(tensor: Tensor, ranks: TensorParallel) -> Tensor:
    """Pass `tensor` to a split layer: identity forward, sum of the ranks' gradients backward."""
    return _apply(_CopyToRanks.apply, tensor, ranks)


def sum_over_ranks(tensor: Tensor, ranks: TensorParallel) -> Tensor:
    """Return the sum of the ranks' partial results; identity backward."""
    return _apply(_SumOverRanks.apply, tensor, ranks)


def _apply(function: Callable[..., Any], tensor: Tensor, ranks: TensorParallel) -> Tensor:
    if ranks.size == 1:
        return tensor
    result: Tensor = function(tensor, ranks)
    return result


def _sharded(values: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(values)
    parameter.model_parallel = True  # type: ignore[attr-defined]
    return parameter


class ColumnParallelLinear(nn.Module):
    """y = x A^T + b, the rows of A (outputs) split over ranks: x is whole on every rank, y is this rank's part."""

    def __init__(
        self, inputs: int, outputs: int, std: float, draw: Draw, ranks: TensorParallel, has_bias: bool = True
    ) -> None:
        super().__init__()
        rows = ranks.part(outputs)
        self.ranks = ranks
        self.weight = _sharded(draw.normal("weight", (outputs, inputs), std, rows=rows))
        self.bias = _sharded(torch.zeros(rows.stop - rows.start)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs), the same on every rank -> (..., outputs / tp)."""
        return F.linear(copy_to_ranks(x, self.ranks), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x A^T + b, the columns of A (inputs) split over ranks: x is this rank's part, y is whole on every rank."""

    def __init__(
        self, inputs: int, outputs: int, std: float, draw: Draw, ranks: TensorParallel, has_bias: bool = True
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = _sharded(draw.normal("weight", (outputs, inputs), std, columns=ranks.part(inputs)))
        self.bias = nn.Parameter(torch.zeros(outputs)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs / tp) -> (..., outputs), the same on every rank. The bias is added once, after the sum."""
        if self.ranks.size == 1:
            return F.linear(x, self.weight, self.bias)
        total = sum_over_ranks(F.linear(x, self.weight), self.ranks)
        return total if self.bias is None else total + self.bias


class VocabularyParallelTable(nn.Module):
    """A table with one row per token, split over ranks by rows; padding rows are zero and stay zero.

    `weight` is its only parameter, because that is all that tied stages share: any other parameter would drift.
    """

    def __init__(
        self, vocab_size: int, padded_vocab_size: int, hidden: int, std: float, draw: Draw, ranks: TensorParallel
    ) -> None:
        super().__init__()
        rows = ranks.part(padded_vocab_size)
        self.ranks = ranks
        self.first_token = rows.start
        self.weight = _sharded(
            draw.normal("weight", (padded_vocab_size, hidden), std, rows=rows, num_drawn_rows=vocab_size)
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Token numbers (batch, length) -> their rows (batch, length, hidden), the same on every rank."""
        if self.ranks.size == 1:
            return F.embedding(tokens, self.weight)
        rows = tokens - self.first_token
        is_elsewhere = (rows < 0) | (rows >= len(self.weight))
        mine = F.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return sum_over_ranks(mine.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.ranks)

    def logits(self, x: Tensor) -> Tensor:
        """(batch, length, hidden), the same on every rank -> (batch, length, padded vocabulary / tp)."""
        return F.linear(copy_to_ranks(x, self.ranks), self.weight)
