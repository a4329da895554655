"""Counts the parameters of a GPT, in total, per pipeline layer, per stage and per rank, and their bytes in memory.

Counts are exact for the model that `bsl train` builds: learned, rotary or alibi positions, two norms per layer, one
after the last layer, and optionally one after the embedding. With tied embeddings, the head is the word embedding:
there is nothing more to train, but the last stage has a copy. With experts, a rank holds whole ones, which tensor
parallelism does not cut (Megatron's expert tensor parallelism of 1), and the router is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from bigsci_launch.config.schema.run import Activation, Norm, Positions, RunConfig
from bigsci_launch.config.schema.technique import ExpertProducts, Framework
from bigsci_launch.plan.shape.partition import Layer, PartitionRule, Stages, cut_layers


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: how many, how many a token visits, the width of one and of all shared ones, the first
    layers without them, the share of tokens that an expert accepts (None: all that come), and whether one kernel does
    the products of all or a loop does one after the other (None: what the framework usually does)."""

    count: int
    per_token: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    dense_layers: int = 0
    capacity_factor: float | None = None
    products: ExpertProducts | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a GPT in elements. `vocab_size` is that of the text; `padded_vocab_size` is what is trained."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    sequence_length: int
    vocab_size: int
    vocab_size_multiple: int = 128
    tied_embeddings: bool = True
    embedding_norm: bool = False
    positions: Positions = "learned"
    num_key_value_heads: int | None = None
    activation: Activation = "gelu"
    norm: Norm = "layernorm"
    biases: bool = True
    head_size: int | None = None
    experts: Experts | None = None

    @classmethod
    def of_config(cls, config: RunConfig) -> ModelShape:
        """Return the shape that a run file describes."""
        model = config.model
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            ffn_hidden_size=config.ffn_hidden_size,
            sequence_length=model.sequence_length,
            vocab_size=model.vocab_size,
            vocab_size_multiple=model.vocab_size_multiple,
            tied_embeddings=model.tied_embeddings,
            embedding_norm=model.embedding_norm,
            positions=model.positions,
            num_key_value_heads=model.num_key_value_heads,
            activation=model.activation,
            norm=model.norm,
            biases=model.biases,
            head_size=model.head_size,
            experts=Experts(**model.experts.model_dump()) if model.experts else None,
        )

    def padded_vocab_size(self, tp: int) -> int:
        """`vocab_size` rounded up to a multiple of `vocab_size_multiple` x tp (Megatron's rule)."""
        multiple = self.vocab_size_multiple * tp
        return -(-self.vocab_size // multiple) * multiple

    @property
    def head_dim(self) -> float:
        """Width of one attention head; not a whole number if heads do not divide the hidden size."""
        return self.head_size or self.hidden_size / self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads: the hidden size, unless heads have a width of their own."""
        return self.head_size * self.num_attention_heads if self.head_size else self.hidden_size

    @property
    def key_value_size(self) -> int:
        """Width of the keys of all heads, and of the values."""
        return self.query_size * (self.num_key_value_heads or self.num_attention_heads) // self.num_attention_heads

    @property
    def mlp_inputs(self) -> int:
        """Matrices of `ffn_hidden_size` outputs at the entry of the MLP: one, or two with a gate."""
        return 2 if self.activation == "swiglu" else 1

    @property
    def attention_matrices(self) -> int:
        """Weights in the matrices of one layer's attention."""
        return 2 * self.hidden_size * (self.query_size + self.key_value_size)

    @property
    def layer_matrices(self) -> int:
        """Weights in the matrices of one transformer layer without experts."""
        return self.attention_matrices + self.mlp_matrices(self.ffn_hidden_size)

    def mlp_matrices(self, width: int) -> int:
        """Weights in the matrices of an MLP, or of an expert, of that width."""
        return (self.mlp_inputs + 1) * self.hidden_size * width

    @property
    def expert_layers(self) -> int:
        return self.num_layers - self.experts.dense_layers if self.experts else 0

    @property
    def norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.norm == "layernorm" and self.biases else 1)


def count_layer_parameters(shape: ModelShape) -> int:
    """Return the parameters of one transformer layer: 12 h^2 + 13 h for a GELU MLP of 4 h with biases and layer norms,
    if every head has its own keys and values. With experts, the mean over the layers, with all experts."""
    parts = _layer_parts(shape)
    return parts.sharded + parts.replicated + parts.experts


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Parameters of one layer: those that tensor parallelism shards (matrices, column biases), those that it
    replicates, and those of experts, which are spread over `expert_shards`. Means over the layers."""

    sharded: int
    replicated: int
    experts: int

    def on_rank(self, tp: int, expert_shards: int = 1) -> int:
        """Return the parameters that one rank holds."""
        return self.sharded // tp + self.replicated + self.experts // expert_shards


@lru_cache(maxsize=4096)
def _layer_parts(shape: ModelShape) -> LayerParts:
    h, norms, experts = shape.hidden_size, 2 * shape.norm_parameters, shape.experts
    biases = shape.query_size + 2 * shape.key_value_size + shape.mlp_inputs * shape.ffn_hidden_size
    sharded = shape.layer_matrices + (biases if shape.biases else 0)
    replicated = norms + (2 * h if shape.biases else 0)
    if experts is None:
        return LayerParts(sharded, replicated, 0)
    share = shape.expert_layers / shape.num_layers
    dense = shape.mlp_matrices(shape.ffn_hidden_size)
    shared = shape.mlp_matrices(experts.shared_ffn_hidden_size)
    return LayerParts(
        round(shape.attention_matrices + (1 - share) * dense + share * shared),
        round(norms + share * h * experts.count),
        round(share * experts.count * shape.mlp_matrices(experts.ffn_hidden_size)),
    )


def count_parameters(shape: ModelShape, tp: int = 1) -> int:
    """Return the parameters of the whole model, each counted once, with the vocabulary padded for `tp`."""
    return _layers_outside(shape, tp) + shape.num_layers * count_layer_parameters(shape)


def count_active_parameters(shape: ModelShape, tp: int = 1) -> int:
    """Return the parameters that a token meets: all of a dense model, and with experts those that it visits."""
    return _layers_outside(shape, tp) + shape.num_layers * active_layer_parameters(shape)


def active_layer_parameters(shape: ModelShape) -> int:
    """Return the parameters of a layer that a token meets, the mean over the layers."""
    parts = _layer_parts(shape)
    return parts.sharded + parts.replicated + _visited(shape)


def active_layer_matrices(shape: ModelShape) -> int:
    """Return the weights in the matrices of a layer that a token meets, the mean over the layers; without routers."""
    return _layer_parts(shape).sharded + _visited(shape) if shape.experts else shape.layer_matrices


def _visited(shape: ModelShape) -> int:
    """Return the parameters of the experts that a token visits."""
    experts = shape.experts
    return _layer_parts(shape).experts * experts.per_token // experts.count if experts else 0


def _layers_outside(shape: ModelShape, tp: int) -> int:
    """Return the parameters outside of the transformer layers."""
    embeddings = shape.padded_vocab_size(tp) * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    norms = _input_norm_parameters(shape) + shape.norm_parameters
    return embeddings + count_position_parameters(shape) + norms


def count_position_parameters(shape: ModelShape) -> int:
    """Return the parameters of the positions: a vector for each if they are learned, else none."""
    return shape.sequence_length * shape.hidden_size if shape.positions == "learned" else 0


def _input_norm_parameters(shape: ModelShape) -> int:
    """Return the parameters of the norm after the embedding, if there is one."""
    return shape.norm_parameters if shape.embedding_norm else 0


def pipeline_layers(
    shape: ModelShape, tp: int = 1, framework: Framework = "bsl", expert_shards: int = 1
) -> tuple[Layer, ...]:
    """Return the layer list from which the pipeline is cut, with the class names of the program that trains.

    DeepSpeed counts the parameters on one rank, so counts are those of a tensor-parallel rank. Items without weights
    matter, because a cut may fall on either side of them. Programs that cut no such list have the list of `bsl train`.
    """
    norm, table = shape.norm_parameters, shape.padded_vocab_size(tp) // tp * shape.hidden_size
    first, block, last = _FRAMEWORK_LAYERS["deepspeed" if framework == "deepspeed" else "bsl"]
    sizes = {
        "VocabularyEmbedding": table,
        "OutputEmbedding": table,
        "LearnedPositions": count_position_parameters(shape),
        "InputNorm": norm,
        "EmbeddingPipe": table + count_position_parameters(shape) + _input_norm_parameters(shape),
        "FinalNorm": norm,
        "MixedFusedLayerNorm": norm,
    }
    if framework != "deepspeed":
        last = last if shape.tied_embeddings else (*last[:-1], "OutputEmbedding")
        first = first if shape.positions == "learned" else first[:1]
        first = (*first, "InputNorm") if shape.embedding_norm else first
    layer = _layer_parts(shape).on_rank(tp, expert_shards)
    return (
        *(Layer(name, sizes.get(name, 0)) for name in first),
        *(Layer(block, layer, is_transformer=True) for _ in range(shape.num_layers)),
        *(Layer(name, sizes.get(name, 0)) for name in last),
    )


# Class names before, of, and after the transformer layers. `function` is a lambda in Megatron-DeepSpeed's list.
_FRAMEWORK_LAYERS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "bsl": (("VocabularyEmbedding", "LearnedPositions"), "TransformerLayer", ("FinalNorm", "VocabularyEmbedding")),
    "deepspeed": (
        ("function", "EmbeddingPipe", "function"),
        "ParallelTransformerLayerPipe",
        ("function", "MixedFusedLayerNorm", "EmbeddingPipe", "function"),
    ),
}


@lru_cache(maxsize=4096)
def cut_model(
    shape: ModelShape,
    method: str,
    pp: int,
    rule: PartitionRule = PartitionRule.BALANCE,
    tp: int = 1,
    framework: Framework = "bsl",
    expert_shards: int = 1,
) -> Stages:
    """Return the stages of `shape` under DeepSpeed's partition method.

    Raises:
        ValueError: the method is unknown or matches no layer.
    """
    return cut_layers(pipeline_layers(shape, tp, framework, expert_shards), method, pp, rule)


def count_stage_parameters(
    shape: ModelShape, tp: int, layers_per_stage: tuple[int, ...], expert_shards: int = 1
) -> tuple[int, ...]:
    """Return the parameters per rank of every stage, first stage first.

    The word and position embeddings are on the first stage, the final norm and the head (a copy of the word embedding
    where they are tied and there is more than one stage) on the last.
    """
    block = _layer_parts(shape).on_rank(tp, expert_shards)
    table = shape.padded_vocab_size(tp) // tp * shape.hidden_size
    last = len(layers_per_stage) - 1
    has_own_head = last > 0 or not shape.tied_embeddings
    counts = [layers * block for layers in layers_per_stage]
    counts[0] += table + count_position_parameters(shape) + _input_norm_parameters(shape)
    counts[last] += shape.norm_parameters + (table if has_own_head else 0)
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one rank's training state, without activations and the framework's own memory."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    num_parameters: int, shards: float, *, weight: int = 2, gradient: int = 4, zero_stage: int = 1
) -> StateBytes:
    """Return the weights, gradients and AdamW's state of one rank, of which ZeRO shards the more the higher its stage.

    `weight` and `gradient` are bytes per parameter: bf16 keeps all bf16 weights and fp32 gradients, and a share of fp32
    masters and two moments: 18 bytes with 1 shard. The share is the same in every format.
    """
    per_parameter = (weight, gradient, 12)
    shared_from = (3, 2, 1)
    weights, gradients, optimizer = (
        size * num_parameters / (shards if zero_stage >= stage else 1)
        for size, stage in zip(per_parameter, shared_from, strict=True)
    )
    return StateBytes(weights, gradients, optimizer)


def checkpoint_bytes(shape: ModelShape, tp: int) -> int:
    """Return the bytes of a bf16 checkpoint in DeepSpeed's layout: per parameter, weights 2, masters and moments 12.

    BLOOM's 176.2 B parameters give 2.47 TB, or 2.25 TiB (2.3 TB were reported, in binary units).
    """
    return 14 * count_parameters(shape, tp)
