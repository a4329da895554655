"""Layers whose weights are split over the tensor-parallel ranks.

Two conjugate functions do all the communication: `copy_to_ranks` (identity forward, sum backward) goes before a
column-parallel layer, `sum_over_ranks` (sum forward, identity backward) after a row-parallel one. Split weights carry
`model_parallel = True`: DeepSpeed counts those on every rank in the gradient norm, and all others once.

With sequence parallelism (Korthikanti et al., arXiv 2205.05198), each rank has the stream between these two for its own
part of every sequence: norms, dropout and sums keep 1 / tp of it, and so does what pipeline stages send. The first
function then gathers the parts, and sums gradients into parts backward; the second one does the reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bigsci_launch.train.parallel.initial_weights import Draw


class TensorParallel:
    """This rank's place among the `size` ranks that split every layer; `group` is None if there is only one.

    `parts` counts the parts of a sequence in the stream: all ranks have one whole, or each has its own.
    """

    def __init__(
        self, rank: int, size: int, group: dist.ProcessGroup | None, *, splits_sequences: bool = False
    ) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.parts = size if splits_sequences else 1
        self.place = f"{type(self).__name__} {rank} of {size}"
        _PLACES[self.place] = self

    def all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `tensor` over the tensor-parallel ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=operation, group=self.group)

    def gather(self, part: Tensor) -> Tensor:
        """(batch, length / tp, hidden), each rank's own part -> (batch, length, hidden), the same on every rank."""
        batch, length, hidden = part.shape
        parts = part.new_empty(self.size * batch, length, hidden)
        if self._reduces_only(part):
            parts.zero_().view(self.size, *part.shape)[self.rank] = part
            self.all_reduce(parts)
        else:
            dist.all_gather_into_tensor(parts, part.contiguous(), group=self.group)
        return parts.view(self.size, *part.shape).transpose(0, 1).reshape(batch, -1, hidden)

    def sum_into_parts(self, whole: Tensor) -> Tensor:
        """(batch, length, hidden) -> (batch, length / tp, hidden), this rank's part of the sum over the ranks."""
        batch, length, hidden = whole.shape
        parts = whole.view(batch, self.size, -1, hidden).transpose(0, 1).contiguous()
        if self._reduces_only(whole):
            self.all_reduce(parts)
            return parts[self.rank].clone()
        mine = whole.new_empty(batch, length // self.size, hidden)
        dist.reduce_scatter_tensor(mine, parts.flatten(0, 1), group=self.group)
        return mine

    def _reduces_only(self, tensor: Tensor) -> bool:
        """Return whether only `all_reduce` is certain to work: gloo, for ranks that share a GPU."""
        return tensor.is_cuda and dist.get_backend(self.group) == dist.Backend.GLOO

    def positions(self, stream: Tensor) -> slice:
        """Return the positions in their sequences of the tokens of this rank's stream, (batch, length, hidden)."""
        first = self.rank * stream.shape[1] if self.parts > 1 else 0
        return slice(first, first + stream.shape[1])

    def part(self, size: int) -> slice:
        """Return this rank's part of a dimension of `size` elements.

        Raises:
            ValueError: `size` is not divisible by the number of ranks.
        """
        if size % self.size:
            raise ValueError(f"{size} is not divisible by {self.size} tensor-parallel ranks")
        width = size // self.size
        return slice(self.rank * width, (self.rank + 1) * width)


_PLACES: WeakValueDictionary[str, TensorParallel] = WeakValueDictionary()
"""The newest of each name. Compiled code has the names alone, so no group of an earlier generation outlives it."""


@torch.library.custom_op("bsl::sum_over_ranks", mutates_args=("tensor",), schema="(Tensor(a!) tensor, str place) -> ()")
def _sum_at(tensor: Tensor, place: str) -> None:
    _PLACES[place].all_reduce(tensor)


def _sum_in_place(tensor: Tensor, ranks: TensorParallel) -> None:
    """Sum over ranks: in compiled code by the same call, so that whoever looks at such calls sees it."""
    if torch.compiler.is_compiling():
        _sum_at(tensor, ranks.place)
    else:
        ranks.all_reduce(tensor)


@torch.library.custom_op("bsl::gather", mutates_args=())
def _gather_at(part: Tensor, place: str) -> Tensor:
    return _PLACES[place].gather(part)


@_gather_at.register_fake
def _(part: Tensor, place: str) -> Tensor:
    return part.new_empty(part.shape[0], part.shape[1] * _PLACES[place].size, part.shape[2])


@torch.library.custom_op("bsl::sum_into_parts", mutates_args=())
def _sum_into_parts_at(whole: Tensor, place: str) -> Tensor:
    return _PLACES[place].sum_into_parts(whole)


@_sum_into_parts_at.register_fake
def _(whole: Tensor, place: str) -> Tensor:
    return whole.new_empty(whole.shape[0], whole.shape[1] // _PLACES[place].size, whole.shape[2])


def _gather(part: Tensor, ranks: TensorParallel) -> Tensor:
    whole: Tensor = _gather_at(part, ranks.place) if torch.compiler.is_compiling() else ranks.gather(part)
    return whole


def _sum_into_parts(whole: Tensor, ranks: TensorParallel) -> Tensor:
    if torch.compiler.is_compiling():
        part: Tensor = _sum_into_parts_at(whole, ranks.place)
        return part
    return ranks.sum_into_parts(whole)


def make_tensor_parallel(
    groups: tuple[tuple[int, ...], ...], rank: int, *, splits_sequences: bool = False
) -> TensorParallel:
    """Return the tensor-parallel place of `rank`; a collective call that needs the same `groups` on every rank."""
    mine = None
    for ranks in groups:
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            mine = TensorParallel(ranks.index(rank), len(ranks), group, splits_sequences=splits_sequences)
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
        _sum_in_place(total, ctx.ranks)
        return total, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorParallel) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        _sum_in_place(total, ranks)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return _gather(part, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return _sum_into_parts(gradients[0].contiguous(), ctx.ranks), None


class _SumIntoParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return _sum_into_parts(whole.contiguous(), ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return _gather(gradients[0], ctx.ranks), None


def copy_to_ranks(tensor: Tensor, ranks: TensorParallel) -> Tensor:
    """Pass the stream to a split layer, whole: identity forward, sum of the ranks' gradients backward."""
    return _apply(_CopyToRanks.apply if ranks.parts == 1 else _GatherParts.apply, tensor, ranks)


def sum_over_ranks(tensor: Tensor, ranks: TensorParallel) -> Tensor:
    """Return the sum of the ranks' partial results to the stream; identity backward."""
    return _apply(_SumOverRanks.apply if ranks.parts == 1 else _SumIntoParts.apply, tensor, ranks)


def drop(stream: Tensor, probability: float, ranks: TensorParallel) -> Tensor:
    """Return `stream` with dropout. Ranks with parts of it draw for the whole, and use what was drawn for their part.

    So all tensor-parallel ranks keep the same random states, and drop the same elements whether they split sequences.
    """
    if ranks.parts == 1:
        return F.dropout(stream, probability)
    batch, length, hidden = stream.shape
    kept = F.dropout(stream.new_ones(batch, length * ranks.parts, hidden), probability)
    return stream * kept[:, ranks.positions(stream)].clone()


def _apply(function: Callable[..., Any], tensor: Tensor, ranks: TensorParallel) -> Tensor:
    if ranks.size == 1:
        return tensor
    result: Tensor = function(tensor, ranks)
    return result


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes x W^T + b as `F.linear` does; `fp8.py` has another one."""


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
        self.product: Product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """The stream, (batch, length, inputs), or this rank's part of it -> (batch, length, outputs / tp)."""
        return self.product(copy_to_ranks(x, self.ranks), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x A^T + b, the columns of A (inputs) split over ranks: x is this rank's part, y is whole on every rank."""

    def __init__(
        self, inputs: int, outputs: int, std: float, draw: Draw, ranks: TensorParallel, has_bias: bool = True
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = _sharded(draw.normal("weight", (outputs, inputs), std, columns=ranks.part(inputs)))
        self.bias = nn.Parameter(torch.zeros(outputs)) if has_bias else None
        self.product: Product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, inputs / tp) -> (batch, length, outputs), or this rank's part of it.

        The bias is added once, after the sum.
        """
        if self.ranks.size == 1:
            return self.product(x, self.weight, self.bias)
        total = sum_over_ranks(self.product(x, self.weight, None), self.ranks)
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
        self.product: Product = F.linear

    def embed(self, tokens: Tensor) -> Tensor:
        """Token numbers (batch, length) -> their rows (batch, length, hidden), or this rank's part of them."""
        return sum_over_ranks(self.rows_here(tokens), self.ranks)

    def rows_here(self, tokens: Tensor) -> Tensor:
        """Token numbers (batch, length) -> the rows that this rank has, and zeros (batch, length, hidden)."""
        if self.ranks.size == 1:
            return F.embedding(tokens, self.weight)
        rows = tokens - self.first_token
        is_elsewhere = (rows < 0) | (rows >= len(self.weight))
        mine = F.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return mine.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)

    def logits(self, x: Tensor) -> Tensor:
        """The stream, (batch, length, hidden), or this rank's part of it -> (batch, length, padded vocabulary / tp)."""
        return self.product(copy_to_ranks(x, self.ranks), self.weight, None)
