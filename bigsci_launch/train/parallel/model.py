"""The GPT that `bsl train` trains, built as a list of pipeline layers.

    VocabularyEmbedding, LearnedPositions (or none), InputNorm (optional), TransformerLayer x L, FinalNorm,
    VocabularyEmbedding again (tied) or OutputEmbedding

Rotary and alibi positions are computed inside attention. Weights that one tensor-parallel rank needs together are
adjacent rows (a key/value head with its queries, an output of the MLP with its gate), so rows can be split for any tp.

`parallelism.partition_method` matches class names: `type:transformer|embedding` gives a slot to each transformer layer
and to the embeddings at both ends, but none to positions and norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsci_launch.config.schema.run import Activation, Norm, Positions, RunConfig
from bigsci_launch.train.parallel.initial_weights import Draw
from bigsci_launch.train.parallel.positions import (
    Tables,
    alibi_biases,
    alibi_slopes,
    attend_in_blocks,
    is_in_blocks,
    rotary_angles,
    rotate,
)
from bigsci_launch.train.parallel.selective import compute_selectively
from bigsci_launch.train.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabularyParallelTable,
    drop,
)


@dataclass(frozen=True, slots=True)
class GptSizes:
    """Sizes of the model, as numbers of elements."""

    num_layers: int
    hidden: int
    heads: int
    ffn_hidden: int
    length: int
    vocab: int
    padded_vocab_size: int
    dropout: float
    epsilon: float
    std: float
    positions: Positions = "learned"
    key_value_heads: int | None = None
    activation: Activation = "gelu"
    norm: Norm = "layernorm"
    biases: bool = True

    @classmethod
    def of_config(cls, config: RunConfig) -> GptSizes:
        """Return the sizes in a run file, with the vocabulary padded for its tp size."""
        model = config.model
        return cls(
            num_layers=model.num_layers,
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            ffn_hidden=config.ffn_hidden_size,
            length=model.sequence_length,
            vocab=model.vocab_size,
            padded_vocab_size=config.padded_vocab_size,
            dropout=model.dropout,
            epsilon=model.layernorm_epsilon,
            std=model.init_std,
            positions=model.positions,
            key_value_heads=model.num_key_value_heads,
            activation=model.activation,
            norm=model.norm,
            biases=model.biases,
        )

    @property
    def output_std(self) -> float:
        """Initial std of layers that write to the residual stream: smaller, because 2 x L of them add up (GPT-2)."""
        return self.std / math.sqrt(2 * self.num_layers)


def make_norm(sizes: GptSizes) -> nn.LayerNorm | nn.RMSNorm:
    """Return a norm over the width of the residual stream."""
    if sizes.norm == "rmsnorm":
        return nn.RMSNorm(sizes.hidden, eps=sizes.epsilon)
    return nn.LayerNorm(sizes.hidden, eps=sizes.epsilon, bias=sizes.biases)


class VocabularyEmbedding(VocabularyParallelTable):
    """Maps tokens to vectors. If tied, the last stage holds a copy and uses it through `tied_logits`."""

    def __init__(self, sizes: GptSizes, draw: Draw, ranks: TensorParallel) -> None:
        super().__init__(sizes.vocab, sizes.padded_vocab_size, sizes.hidden, sizes.std, draw, ranks)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, hidden)."""
        return self.embed(tokens)


def tied_logits(embedding: VocabularyEmbedding, x: Tensor) -> Tensor:
    """Apply the embedding's weight as output layer: (batch, length, hidden) -> (.., padded vocabulary / tp)."""
    return embedding.logits(x)


class OutputEmbedding(VocabularyParallelTable):
    """The untied output layer, with its own weight."""

    def __init__(self, sizes: GptSizes, draw: Draw, ranks: TensorParallel) -> None:
        super().__init__(sizes.vocab, sizes.padded_vocab_size, sizes.hidden, sizes.std, draw, ranks)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> (batch, length, padded vocabulary / tp)."""
        return self.logits(x)


class LearnedPositions(nn.Module):
    """Adds a learned vector per position; identical on every tensor-parallel rank."""

    def __init__(self, sizes: GptSizes, draw: Draw, ranks: TensorParallel) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = nn.Parameter(draw.normal("weight", (sizes.length, sizes.hidden), sizes.std))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> the same."""
        return x + self.weight[self.ranks.positions(x)]


class InputNorm(nn.Module):
    """A norm after the embeddings; a separate pipeline layer, so that only the first stage has it."""

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        self.norm = make_norm(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> the same."""
        result: Tensor = self.norm(x)
        return result


class SelfAttention(nn.Module):
    """Causal attention, split over tp by heads of keys and values.

    In the weight, the queries of the heads that share a key/value head come first, then its key and its value.
    """

    def __init__(self, sizes: GptSizes, draw: Draw, ranks: TensorParallel) -> None:
        super().__init__()
        shared = sizes.key_value_heads or sizes.heads
        self.head_dim = sizes.hidden // sizes.heads
        self.num_local_groups = shared // ranks.size
        self.queries_per_group = sizes.heads // shared
        rows = (sizes.heads + 2 * shared) * self.head_dim
        self.qkv = ColumnParallelLinear(sizes.hidden, rows, sizes.std, draw.inside("qkv"), ranks, sizes.biases)
        self.output = RowParallelLinear(
            sizes.hidden, sizes.hidden, sizes.output_std, draw.inside("output"), ranks, sizes.biases
        )
        self.positions = sizes.positions
        self.slopes = tuple(alibi_slopes(sizes.heads)[ranks.part(sizes.heads)])

    def length(self, x: Tensor) -> int:
        """Return the whole length of the sequences in the stream `x`, which may hold only this rank's part of each."""
        return x.shape[1] * self.qkv.ranks.parts

    def tables(self, x: Tensor) -> Tables:
        """Return what the positions of `x` need: cosines and sines, or biases of the scores."""
        if self.positions == "rotary":
            return rotary_angles(self.length(x), self.head_dim, x.device)
        if self.positions == "alibi":
            return (alibi_biases(self.slopes, self.length(x), x.dtype, x.device),)
        return ()

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        """(batch, length, hidden) -> the same."""
        query, key, value = self.heads(self.qkv(x))
        if self.positions == "rotary":
            query, key = rotate(query, *tables), rotate(key, *tables)
        context = self._attend(query, key, value, tables)
        result: Tensor = self.output(context.transpose(1, 2).flatten(2))
        return result

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, tables: Tables) -> Tensor:
        is_shared = self.queries_per_group > 1
        if self.positions == "alibi" and is_in_blocks(tables):
            return attend_in_blocks(query, key, value, *tables, is_shared=is_shared)
        biases = tables[0] if self.positions == "alibi" else None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=biases, is_causal=biases is None, enable_gqa=is_shared
        )

    def heads(self, qkv: Tensor) -> Sequence[Tensor]:
        """Products with the weight, (batch, length, rows) -> queries, keys and values (batch, heads, length, head_dim);
        there are as many heads of keys and of values as groups."""
        grouped = qkv.view(*qkv.shape[:2], self.num_local_groups, self.queries_per_group + 2, self.head_dim)
        if self.queries_per_group == 1:
            return grouped.permute(3, 0, 2, 1, 4).unbind()
        query, key, value = torch.split(grouped, [self.queries_per_group, 1, 1], dim=3)
        return [heads.flatten(2, 3).transpose(1, 2) for heads in (query, key, value)]


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, or with SwiGLU: even rows of the first are the gates of odd rows."""

    def __init__(self, sizes: GptSizes, draw: Draw, ranks: TensorParallel) -> None:
        super().__init__()
        self.is_gated = sizes.activation == "swiglu"
        rows = sizes.ffn_hidden * (2 if self.is_gated else 1)
        self.up = ColumnParallelLinear(sizes.hidden, rows, sizes.std, draw.inside("up"), ranks, sizes.biases)
        self.down = RowParallelLinear(
            sizes.ffn_hidden, sizes.hidden, sizes.output_std, draw.inside("down"), ranks, sizes.biases
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> the same."""
        result: Tensor = self.down(self._activate(self.up(x)))
        return result

    def _activate(self, x: Tensor) -> Tensor:
        if not self.is_gated:
            return F.gelu(x)
        gate, value = x[..., 0::2], x[..., 1::2]
        return F.silu(gate) * value


class TransformerLayer(nn.Module):
    """A pre-norm layer: attention and MLP, each added to the residual stream after dropout.

    `compiled` computes the same, as compiled code; None where layers are not compiled. `is_selective`: an eager layer
    keeps the results of products and attention, and computes the rest again in the backward pass.
    """

    compiled: Callable[[TransformerLayer, Tensor], Tensor] | None = None
    is_selective = False

    def __init__(self, sizes: GptSizes, draw: Draw, ranks: TensorParallel) -> None:
        super().__init__()
        self.attention_norm = make_norm(sizes)
        self.attention = SelfAttention(sizes, draw.inside("attention"), ranks)
        self.mlp_norm = make_norm(sizes)
        self.mlp = Mlp(sizes, draw.inside("mlp"), ranks)
        self.ranks = ranks
        self.dropout = sizes.dropout

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> the same."""
        if self.compiled is not None:
            return self.compiled(self, x)
        tables = self.attention.tables(x)
        return compute_selectively(self.compute, x, tables) if self.is_selective else self.compute(x, tables)

    def compute(self, x: Tensor, tables: Tables) -> Tensor:
        """Return what `forward` does, one operation after the other; `tables` are those of `SelfAttention`."""
        x = x + self._drop(self.attention(self.attention_norm(x), tables))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return drop(x, self.dropout, self.ranks) if self.dropout and self.training else x


class FinalNorm(nn.Module):
    """The norm before the output layer."""

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        self.norm = make_norm(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> the same."""
        result: Tensor = self.norm(x)
        return result


def count_parameters(module: nn.Module) -> int:
    """Return the number of elements in all parameters of `module`."""
    return sum(parameter.numel() for parameter in module.parameters())
