"""Memory of a rank on each stage: state, kept activations, working set, and what the allocator adds.

There are two figures. `need_gib` is in use at some moment of the step. `predicted_gib` is what nvidia-smi shows, which
is more because the allocator keeps freed blocks. It returns them when memory gets short, so only the need decides
whether a rank runs out.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.plan.price.constants import Constants
from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.price.held import expert_shard_ranks, expert_weights, layer_weights, shard_ranks
from bigsci_launch.plan.shape.parameters import count_position_parameters
from bigsci_launch.plan.shape.setup import Setup

GIB = 2.0**30

FP32_GRADIENT_BYTES = 5.0
"""Bytes per parameter of fp32 gradient accumulators: 4, plus waste in their flat buffers (5.1 were measured)."""

OOM_MARGIN = 0.02
"""Share by which the need must exceed the memory to count as out of memory: the model's error near the limit."""

GUESSED_OOM_MARGIN = 0.1
"""The same if no memory was measured on the cluster."""

SQUEEZED_SHARE = 0.97
"""Share of the memory that the allocator fills with freed blocks."""

TIGHT_SHARE = 0.94
"""Share of the memory above which a plan counts as tight."""


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """Memory of one stage before the constants weigh it; the optimizer in GiB per byte of state per parameter."""

    resident_gib: float
    optimizer_gib_per_byte: float
    kept_gib: float
    working_gib: float


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one rank of a stage, GiB."""

    stage: int
    state_gib: float
    need_gib: float
    predicted_gib: float


def count_memory(setup: Setup, stage: int, num_layers: int | None = None) -> MemoryTerms:
    """Return what a rank of `stage` keeps with `num_layers` transformer layers; default: those that it has.

    1F1B keeps one micro batch for each stage from here to the end, interleaved chunks a little more. With
    recomputation, each is one input per layer, plus one layer's activations while they are recomputed (Korthikanti et
    al., arXiv 2205.05198, section 4).
    """
    shape, topology, technique = setup.shape, setup.topology, setup.technique
    num_layers = setup.layers_per_stage[stage] if num_layers is None else num_layers
    is_last = stage == topology.pp - 1
    in_flight = _in_flight(setup, stage)
    tokens, tp = setup.tokens_per_micro_batch, topology.tp
    stream = tokens * shape.hidden_size / (tp if technique.sequence_parallel else 1)
    one_layer = _layer_bytes(setup)
    full = technique.recomputation == "full"
    recomputed = min(num_layers, technique.recomputed_layers or num_layers) if full else 0
    kept = in_flight * (recomputed * setup.element_bytes * stream + (num_layers - recomputed) * one_layer)
    logits = _logit_bytes(setup) * tokens * shape.padded_vocab_size(tp) / tp if is_last else 0.0
    resident, sharded = _state(setup, stage, num_layers)
    return MemoryTerms(
        resident_gib=resident / GIB,
        optimizer_gib_per_byte=sharded / GIB,
        kept_gib=kept / GIB,
        working_gib=((one_layer if recomputed else 0.0) + logits + in_flight * setup.element_bytes * stream) / GIB,
    )


def _in_flight(setup: Setup, stage: int) -> float:
    """Return the micro batches that a stage keeps at the same time."""
    pp, chunks = setup.topology.pp, setup.technique.chunks_per_rank
    more = (pp - 1) / chunks if chunks > 1 else 0
    return min(setup.num_micro_batches, pp - stage + more)


def _layer_bytes(setup: Setup) -> float:
    """Return what one layer keeps of one micro batch where nothing is recomputed.

    A fused attention kernel keeps no scores, and neither does a layer that recomputes them. Without tensor
    parallelism's sequence part, ten bytes of every element of the stream are on all of its ranks.
    """
    shape, technique, tp = setup.shape, setup.technique, setup.topology.tp
    tokens = setup.tokens_per_micro_batch
    stream = tokens * shape.hidden_size
    held = stream * (34 / tp if technique.sequence_parallel else 10 + 24 / tp) + _changed_bytes(setup) / tp
    if technique.attention == "unfused" and technique.recomputation != "selective":
        held += 5 * shape.num_attention_heads * shape.sequence_length * tokens / tp
    if setup.framework == "torchtitan" and technique.recomputation == "selective":
        held /= 2  # the results of every other product are kept
    return held * setup.element_bytes / 2


def _changed_bytes(setup: Setup) -> float:
    """Return what a layer keeps in 16 bits beyond a layer with a GELU MLP of 4 h in which every head has its own keys
    and values: an input of 4 h and a result of 4 h, 16 bytes per element of the stream.

    Shared keys and values are narrower. A gate keeps its two products, SiLU of one, and the result. Experts keep that,
    their inputs and their results for every token that visits them.
    """
    shape, experts = setup.shape, setup.shape.experts
    per_width = 8 if shape.mlp_inputs == 2 else 4
    attention = 4 * (shape.key_value_size - shape.hidden_size) + 6 * (shape.query_size - shape.hidden_size)
    dense = float(per_width * shape.ffn_hidden_size)
    if experts:
        share = shape.expert_layers / shape.num_layers
        width = experts.ffn_hidden_size * experts.per_token + experts.shared_ffn_hidden_size
        dense = (1 - share) * dense + share * (per_width * width + 4 * experts.per_token * shape.hidden_size)
    return setup.tokens_per_micro_batch * (attention + dense - 16 * shape.hidden_size)


def _logit_bytes(setup: Setup) -> int:
    """Return the bytes of a logit while the loss is computed: in 16 bits with a fused loss, which Megatron-DeepSpeed
    and `bsl train` have, and in fp32 as well otherwise."""
    return 2 if setup.framework in ("bsl", "deepspeed") else 6


def _state(setup: Setup, stage: int, num_layers: int) -> tuple[float, float]:
    """Return the bytes of weights and gradients on a rank, and the bytes of optimizer state per byte of a parameter's.

    ZeRO shards the state from stage 1 on, gradients from stage 2 on, and weights with stage 3, where the rank has two
    layers' weights at a time.
    """
    zero_stage, parameters = setup.technique.zero_stage, _parameters(setup, stage, num_layers)
    shared = _sharded_parameters(setup, parameters, num_layers)
    accumulated = FP32_GRADIENT_BYTES if setup.has_fp32_gradients and setup.precision != "fp32" else 0.0
    weights, gradients = float(setup.element_bytes), setup.element_bytes + accumulated
    if zero_stage >= 2 and setup.framework in ("torchtitan", "fsdp"):
        gradients = 4.0
    held = 2 * layer_weights(setup) if zero_stage == 3 else parameters
    return held * weights + (
        shared if zero_stage >= 2 else parameters
    ) * gradients, shared if zero_stage else parameters


def _sharded_parameters(setup: Setup, parameters: float, num_layers: int) -> float:
    """Return the parameters whose sharded state a rank holds."""
    experts = num_layers * expert_weights(setup)
    return (parameters - experts) / shard_ranks(setup) + experts / expert_shard_ranks(setup)


def _parameters(setup: Setup, stage: int, num_layers: int) -> float:
    """Return the parameters of a rank of `stage` with `num_layers` layers; counts layers and tables, the rest is
    tiny."""
    h, tp, last = setup.shape.hidden_size, setup.topology.tp, setup.topology.pp - 1
    vectors = 9 * h + setup.shape.ffn_hidden_size if setup.shape.biases else 2 * h
    count = num_layers * (layer_weights(setup) + vectors / tp)
    if stage in (0, last):
        count += setup.shape.padded_vocab_size(tp) / tp * h
    if stage == last == 0 and not setup.shape.tied_embeddings:
        count += setup.shape.padded_vocab_size(tp) / tp * h
    if stage == 0:
        count += count_position_parameters(setup.shape)
    return count


def weigh_memory(terms: MemoryTerms, constants: Constants, gpu: GpuModel) -> tuple[float, float]:
    """Return the needed memory and what nvidia-smi will show, in GiB."""
    fixed = (
        constants.base_gib
        + terms.resident_gib
        + terms.optimizer_gib_per_byte * constants.optimizer_bytes
        + terms.working_gib
    )
    need = fixed + terms.kept_gib * min(1.0, constants.activation_factor)
    slack = fixed + terms.kept_gib * constants.activation_factor - need
    return need, need + min(slack, max(0.0, SQUEEZED_SHARE * gpu.memory_gib - need))


def predict_stage_memory(setup: Setup, stage: int, constants: Constants, gpu: GpuModel) -> StageMemory:
    terms = count_memory(setup, stage)
    need, predicted = weigh_memory(terms, constants, gpu)
    return StageMemory(
        stage, terms.resident_gib + terms.optimizer_gib_per_byte * constants.optimizer_bytes, need, predicted
    )


def is_out_of_memory(need_gib: float, gpu: GpuModel, *, is_measured: bool) -> bool:
    """Return whether the need exceeds the GPU's memory by more than the model's error, larger if none was measured."""
    return need_gib > gpu.memory_gib * (1 + (OOM_MARGIN if is_measured else GUESSED_OOM_MARGIN))


def outer_stages(setup: Setup) -> tuple[int, ...]:
    """Return the first and the last stage. One of them is the fullest, and nvidia-smi was read on them."""
    last = setup.topology.pp - 1
    return (0,) if last == 0 else (0, last)
