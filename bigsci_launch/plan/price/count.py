"""Counts the work of a step: what is computed, moved and sent, before any rate weighs it.

Work is counted for one layer and micro batch (the mean over the layers), for the head, for a hop between stages, and
once per step. What runs while the GPU computes is counted apart, as `hidden`.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.plan.price.communication import (
    direct_seconds_per_gb,
    expert_exchange,
    gathered_weights,
    gradient_exchange,
    hop_traffic,
    key_value_exchange,
    tensor_parallel_exchange,
)
from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.price.held import heaviest_stage, layer_weights, shard_ranks
from bigsci_launch.plan.price.products import (
    attention_peak,
    dense_products,
    expert_products,
    product_peak,
    trained_product,
)
from bigsci_launch.plan.price.terms import NO_WORK, WorkByTerm, add_work, work_of
from bigsci_launch.plan.shape.setup import Setup

# Bytes that memory-bound kernels move per element in the forward and in the backward pass, 16-bit activations:
# attention scores (softmax, dropout), the residual stream (norms, dropout, adds), the MLP's inside (GELU), queries and
# keys that are rotated, what is sorted by experts, the logits.
_SCORE_BYTES, _INNER_BYTES, _ROTARY_BYTES, _SORTED_BYTES, _LOGIT_BYTES = (13, 10), (6, 8), (4, 4), (14, 14), 20
_STREAM_BYTES, _COMPILED_STREAM_BYTES, _EAGER_STREAM_BYTES = (25, 20), (30, 30), (55, 44)

CAUSAL = 0.5
"""Share of the scores that a fused kernel computes, since none of them look ahead."""

FUSED_BACKWARD = 2.5
"""Work of the fused kernel's backward pass over its forward pass: it computes the scores again (FlashAttention)."""

DEEPSPEED_STEP_S, STEP_S = 0.3, 0.03
"""Seconds of a step that nothing else explains, with DeepSpeed's engine and without: clipping, the log line, the next
batch."""

OPTIMIZER_TRAFFIC = 34
"""Bytes per parameter that AdamW moves: gradient, master and two moments in fp32 are read, all but the gradient are
written, and the 16-bit weight; the norm reads the gradient again."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a setup. `rounds` divides the time to fill and drain the pipeline: chunks of layers per rank, or what
    a zero-bubble schedule gains. `hidden` of a layer and `hidden_step` run while the GPU computes. The network
    needs `direct_seconds_per_gb` for messages between two ranks, if that is known."""

    layer: WorkByTerm
    hidden: WorkByTerm
    head: WorkByTerm
    hop: WorkByTerm
    step: WorkByTerm
    hidden_step: WorkByTerm
    layers_per_stage: tuple[int, ...]
    num_micro_batches: int
    rounds: int
    direct_seconds_per_gb: float | None
    unexplained_seconds: float
    day_ordinal: int | None
    is_blocking: bool


ZERO_BUBBLE_ROUNDS = 3
"""ZB-H1 leaves a third of the bubble: weight gradients, a third of the work, wait for no other stage (Qi et al.)."""


def count_work(setup: Setup, gpu: GpuModel) -> StepWork:
    """Return the work of one step of `setup`.

    Raises:
        ValueError: the layers cannot be cut into stages.
    """
    technique = setup.technique
    gradients, gathered = gradient_exchange(setup), gathered_weights(setup)
    is_hidden = "data" in technique.overlap
    return StepWork(
        layer=add_work(_layer_work(setup, gpu), NO_WORK if is_hidden else gathered),
        hidden=add_work(gathered if is_hidden else NO_WORK, key_value_exchange(setup)),
        head=_head_work(setup, gpu),
        hop=hop_traffic(setup),
        step=add_work(_optimizer_work(setup), NO_WORK if is_hidden else gradients),
        hidden_step=gradients if is_hidden else NO_WORK,
        layers_per_stage=setup.layers_per_stage,
        num_micro_batches=setup.num_micro_batches,
        rounds=ZERO_BUBBLE_ROUNDS if technique.schedule == "zero_bubble" else technique.chunks_per_rank,
        direct_seconds_per_gb=direct_seconds_per_gb(gpu),
        unexplained_seconds=DEEPSPEED_STEP_S if setup.framework in ("bsl", "deepspeed") else STEP_S,
        day_ordinal=setup.day.toordinal() if setup.day else None,
        is_blocking=setup.has_blocking_launches,
    )


def _layer_work(setup: Setup, gpu: GpuModel) -> WorkByTerm:
    """Return the work of one layer and micro batch, with what is recomputed in the backward pass."""
    shape = setup.shape
    forwards = setup.num_passes - 2
    if setup.framework == "torchtitan" and setup.technique.recomputation == "selective":
        forwards += 0.5  # every other product is repeated
    products = dense_products(setup, gpu, forwards) + expert_products(setup, gpu, forwards)
    is_misaligned = shape.head_dim % 8 != 0
    return add_work(
        add_work(_attention_work(setup, gpu, forwards, is_misaligned=is_misaligned), tensor_parallel_exchange(setup)),
        add_work(
            expert_exchange(setup, gpu),
            work_of(
                products=products / product_peak(setup, gpu),
                launches=1.0,
                traffic=_layer_traffic(setup, forwards) + _accumulation(setup),
            ),
        ),
    )


def _attention_work(setup: Setup, gpu: GpuModel, forwards: float, *, is_misaligned: bool) -> WorkByTerm:
    """Return the work of scores and values. A fused kernel leaves out those that look ahead, and keeps no scores."""
    shape, technique = setup.shape, setup.technique
    scores = setup.tokens_per_micro_batch * shape.sequence_length * shape.num_attention_heads / setup.topology.tp
    repeats = forwards + (1 if technique.recomputation == "selective" else 0)
    forward = 4 * scores * shape.head_dim / attention_peak(setup, gpu)
    if technique.attention == "fused":
        work = CAUSAL * forward * (repeats + FUSED_BACKWARD)
        return work_of(misaligned=work) if is_misaligned else work_of(attention=work)
    traffic = scores * _both(_SCORE_BYTES, repeats) * _width(setup) / 1e12
    work = forward * (repeats + 2)
    return work_of(misaligned=work, traffic=traffic) if is_misaligned else work_of(products=work, traffic=traffic)


def _layer_traffic(setup: Setup, forwards: float) -> float:
    """Return the terabytes that norms, dropout, adds, the MLP's activation and the sorting by experts move."""
    shape, tp, tokens = setup.shape, setup.topology.tp, setup.tokens_per_micro_batch
    h, experts = shape.hidden_size, shape.experts
    dense = 1 - shape.expert_layers / shape.num_layers
    inner = dense * shape.ffn_hidden_size / tp
    moved = 0.0
    if experts:
        visits = experts.per_token * (experts.capacity_factor or 1.0)
        width = experts.ffn_hidden_size * visits + experts.shared_ffn_hidden_size
        inner += (1 - dense) * width / tp
        moved = (1 - dense) * visits * h / tp * _both(_SORTED_BYTES, forwards)
    rotated = (shape.query_size + shape.key_value_size) / tp if shape.positions == "rotary" else 0
    stream = h / (tp if setup.technique.sequence_parallel else 1)
    moved += stream * _both(_stream_bytes(setup), forwards) + rotated * _both(_ROTARY_BYTES, forwards)
    moved += inner * (shape.mlp_inputs + 1) / 2 * _both(_INNER_BYTES, forwards)
    return tokens * moved * _width(setup) / 1e12


def _accumulation(setup: Setup) -> float:
    """Return the terabytes of adding a micro batch's gradients to those before it."""
    if setup.technique.zero_stage >= 2 or _has_fused_kernels(setup):
        return 4 * layer_weights(setup) / 1e12
    return (12 if setup.has_fp32_gradients else 6) * layer_weights(setup) / 1e12


def _stream_bytes(setup: Setup) -> tuple[float, float]:
    if _has_fused_kernels(setup):
        return _COMPILED_STREAM_BYTES
    return _STREAM_BYTES if setup.technique.attention == "unfused" else _EAGER_STREAM_BYTES


def _has_fused_kernels(setup: Setup) -> bool:
    """Return whether norms, adds and the MLP's activation are compiled into few kernels, and products add their
    gradients up themselves: Megatron since it has fused attention, and torchtitan."""
    return setup.framework in ("megatron", "torchtitan") and setup.technique.attention == "fused"


def _both(forward_backward: tuple[float, float], forwards: float) -> float:
    return forward_backward[0] * forwards + forward_backward[1]


def _width(setup: Setup) -> float:
    """Return the bytes of an activation relative to 16 bits."""
    return setup.element_bytes / 2


def _head_work(setup: Setup, gpu: GpuModel) -> WorkByTerm:
    """Return the work of the product with the vocabulary and of the logits, which are never recomputed or in fp8."""
    tokens, tp = setup.tokens_per_micro_batch, setup.topology.tp
    columns = setup.shape.padded_vocab_size(tp) // tp
    products = trained_product(tokens, columns, setup.shape.hidden_size, 1, gpu)
    return work_of(products=products / attention_peak(setup, gpu), traffic=_LOGIT_BYTES * tokens * columns / 1e12)


def _optimizer_work(setup: Setup) -> WorkByTerm:
    """Return the work of AdamW on the heaviest stage's share of a rank."""
    shards = shard_ranks(setup) if setup.technique.zero_stage else 1
    return work_of(traffic=OPTIMIZER_TRAFFIC * heaviest_stage(setup) / shards / 1e12)
