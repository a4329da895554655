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
    logits_exchange,
    tensor_parallel_exchange,
    weight_exchange,
)
from bigsci_launch.plan.price.constants import HOPPER
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
_STREAM_BYTES, _COMPILED_STREAM_BYTES, _EAGER_STREAM_BYTES = (25, 20), (30, 30), (68, 55)
_EAGER_RMS_BYTES = (140, 112)

# Where each step is a kernel of its own: scores are also read and written to be scaled and to be masked; logits are
# cast to fp32, and their logarithms and two gradients are written and read. A loss of each rank's columns
# casts them, looks for the maximum, subtracts it, takes exponentials, adds, divides, multiplies by the gradient, casts.
_SINGLE_SCORE_BYTES, _PLAIN_LOGIT_BYTES, _SINGLE_LOGIT_BYTES = (21, 18), 36, 58

CAUSAL = 0.5
"""Share of the scores that a fused kernel computes, since none of them look ahead."""

HALF_LENGTH, USUAL_LENGTH = 256, 4096
"""Sequence length with which fused attention reaches half of what it reaches with very long ones, and the length for
which the constant is its efficiency."""

FLASH1_SHARE, FLASH3_GAIN, TRITON_SHARE = 0.6, 1.7, 0.55
"""Efficiency of the first FlashAttention relative to that of the second; on Hopper, of the third, and of Triton's in
2023, which was compiled for Ampere."""

_LAUNCHES = {"eager": 0.6, "fused": 0.6, "compiled": 0.3, "graphs": 0.05}
TENSOR_LAUNCHES, STAGE_LAUNCHES = 0.75, 0.7
"""Launches of a layer relative to one whose launches block, by the program's kernels, and what eager programs add for
the collectives of tensor parallelism; in a pipeline with overlap, for each of its ranks. Hosts that wait for messages
between stages do not launch ahead, and each collective waits for the last host: with tp 4, 8 and 16 a layer of the
Ultra-Scale Playbook takes 13, 22 and 46 ms, whatever the model and the micro-batch."""

EXPERT_LAUNCHES = 0.2
"""The same for an expert of a loop: about a dozen kernels in the forward pass, where an eager layer has some forty. The
host also waits for each expert, to learn which tokens visit it. Derived, not measured."""

FUSED_BACKWARD = 2.5
"""Work of the fused kernel's backward pass over its forward pass: it computes the scores again (FlashAttention)."""

STEP_S = {"bsl": 0.1, "deepspeed": 0.1, "other": 0.05, "megatron": 0.03, "torchtitan": 0.03, "fsdp": 0.03}
"""Seconds of a step that nothing else explains: clipping, the log line, the next batch, DeepSpeed's engine."""

OPTIMIZER_TRAFFIC = 34
"""Bytes per parameter that AdamW moves: gradient, master and two moments in fp32 are read, all but the gradient are
written, and the 16-bit weight; the norm reads the gradient again."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a setup. `rounds` divides the time to fill and drain the pipeline: chunks of layers per rank, or what
    a zero-bubble schedule gains. `hidden` of a layer and `hidden_step` run while the GPU computes. The network
    needs `direct_seconds_per_gb` for messages between two ranks, if that is known; each of those between stages waits
    `hop_wait` seconds more."""

    layer: WorkByTerm
    hidden: WorkByTerm
    head: WorkByTerm
    hop: WorkByTerm
    step: WorkByTerm
    hidden_step: WorkByTerm
    layers_per_stage: tuple[int, ...]
    num_micro_batches: int
    rounds: int
    hiding_micro_batches: float
    direct_seconds_per_gb: float | None
    hop_wait: float
    unexplained_seconds: float
    day_ordinal: int | None
    is_blocking: bool


BACKWARD_SHARE = 2 / 3

ZERO_BUBBLE_ROUNDS = 3
"""ZB-H1 leaves a third of the bubble: weight gradients, a third of the work, wait for no other stage (Qi et al.)."""


def count_work(setup: Setup, gpu: GpuModel) -> StepWork:
    """Return the work of one step of `setup`.

    Raises:
        ValueError: the layers cannot be cut into stages.
    """
    technique = setup.technique
    gathered, is_hidden = gathered_weights(setup), "data" in technique.overlap
    late = weight_exchange(setup)  # of the whole stage, after the optimizer
    hidden_step = gradient_exchange(setup) if is_hidden else NO_WORK
    exposed_step = NO_WORK if is_hidden else gradient_exchange(setup)
    if is_hidden and technique.kernels in ("compiled", "graphs"):
        hidden_step = add_work(hidden_step, late)
    else:
        exposed_step = add_work(exposed_step, late)
    return StepWork(
        layer=add_work(_layer_work(setup, gpu), NO_WORK if is_hidden else gathered),
        hidden=add_work(gathered if is_hidden else NO_WORK, key_value_exchange(setup)),
        head=_head_work(setup, gpu),
        hop=hop_traffic(setup),
        step=add_work(_optimizer_work(setup), exposed_step),
        hidden_step=hidden_step,
        layers_per_stage=setup.layers_per_stage,
        num_micro_batches=setup.num_micro_batches,
        rounds=ZERO_BUBBLE_ROUNDS if technique.schedule == "zero_bubble" else technique.chunks_per_rank,
        hiding_micro_batches=_hiding_micro_batches(setup),
        direct_seconds_per_gb=direct_seconds_per_gb(gpu),
        hop_wait=technique.chunks_per_rank * technique.hop_wait,
        unexplained_seconds=STEP_S[setup.framework],
        day_ordinal=setup.day.toordinal() if setup.day else None,
        is_blocking=setup.has_blocking_launches or setup.loops_over_experts,
    )


def _hiding_micro_batches(setup: Setup) -> float:
    """Return how many micro batches of a stage the reduction of its gradients can hide behind: the last one. With
    chunks of layers, those of a chunk are complete while the others still compute."""
    chunks = setup.technique.chunks_per_rank
    if chunks == 1:
        return 1.0
    return BACKWARD_SHARE * (1 + min(setup.num_micro_batches, setup.topology.pp) * (chunks - 1)) / chunks


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
                launches=_launches(setup),
                traffic=_layer_traffic(setup, forwards) + _accumulation(setup),
            ),
        ),
    )


def _launches(setup: Setup) -> float:
    """Return the launches of a layer relative to one whose launches block; the mean over the layers."""
    kernels = setup.technique.kernels
    looped = _looped_experts(setup) * EXPERT_LAUNCHES
    if setup.has_blocking_launches or setup.technique.attention == "unfused":
        return 1.0 + looped
    return _LAUNCHES[kernels] + _tensor_launches(setup) + looped


def _tensor_launches(setup: Setup) -> float:
    tp = setup.topology.tp
    if tp == 1 or setup.technique.kernels not in ("eager", "fused"):
        return 0.0
    return STAGE_LAUNCHES * tp if setup.has_eager_overlap and setup.topology.pp > 1 else TENSOR_LAUNCHES


def _looped_experts(setup: Setup) -> float:
    """Return the experts of a layer that a rank computes one after the other; the mean over the layers."""
    shape, experts = setup.shape, setup.shape.experts
    if experts is None or not setup.loops_over_experts:
        return 0.0
    return max(1, experts.count // setup.expert_shards) * shape.expert_layers / shape.num_layers


def _attention_gain(setup: Setup, gpu: GpuModel) -> float:
    """Return the efficiency of a fused kernel relative to that of FlashAttention 2 with sequences of `USUAL_LENGTH`."""
    length, version = setup.shape.sequence_length, setup.technique.attention
    gain = length / (length + HALF_LENGTH) * (USUAL_LENGTH + HALF_LENGTH) / USUAL_LENGTH
    on_hopper = {"flash3": FLASH3_GAIN, "triton": TRITON_SHARE} if gpu.family in HOPPER else {}
    return gain * {"flash1": FLASH1_SHARE, **on_hopper}.get(version, 1.0)


def _attention_work(setup: Setup, gpu: GpuModel, forwards: float, *, is_misaligned: bool) -> WorkByTerm:
    """Return the work of scores and values. A fused kernel leaves out those that look ahead, and keeps no scores."""
    shape, technique = setup.shape, setup.technique
    scores = setup.tokens_per_micro_batch * shape.sequence_length * shape.num_attention_heads / setup.topology.tp
    repeats = forwards + (1 if technique.recomputation == "selective" else 0)
    forward = 4 * scores * shape.head_dim / attention_peak(setup, gpu)
    if technique.attention != "unfused":
        work = CAUSAL * forward * (repeats + FUSED_BACKWARD) / _attention_gain(setup, gpu)
        return work_of(misaligned=work) if is_misaligned else work_of(attention=work)
    moved = _SCORE_BYTES if setup.has_kernels_of_2021 else _SINGLE_SCORE_BYTES
    traffic = scores * _both(moved, repeats) * _width(setup) / 1e12
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
    if setup.technique.zero_stage >= 2 or (setup.framework == "megatron" and setup.technique.attention != "unfused"):
        return 4 * layer_weights(setup) / 1e12
    return (12 if setup.has_fp32_gradients else 6) * layer_weights(setup) / 1e12


def _stream_bytes(setup: Setup) -> tuple[float, float]:
    """Return what norms, dropout and adds move per element of the stream. torch's layer norm is one kernel, its RMS
    norm several."""
    technique = setup.technique
    if setup.has_kernels_of_2021:
        return _STREAM_BYTES
    if technique.kernels in ("compiled", "graphs"):
        return _COMPILED_STREAM_BYTES
    is_several = technique.kernels == "eager" and setup.shape.norm == "rmsnorm"
    return _EAGER_RMS_BYTES if is_several else _EAGER_STREAM_BYTES


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
    moved = (_SINGLE_LOGIT_BYTES if _has_loss_in_steps(setup) else _LOGIT_BYTES) * columns
    if setup.gathers_logits:
        moved = _PLAIN_LOGIT_BYTES * columns * tp
    work = work_of(products=products / attention_peak(setup, gpu), traffic=moved * tokens / 1e12)
    return add_work(work, logits_exchange(setup))


def _has_loss_in_steps(setup: Setup) -> bool:
    """Return whether each step of the loss is a kernel of its own, though ranks of tp share out the vocabulary."""
    technique = setup.technique
    return setup.framework == "other" and technique.loss == "fused" and technique.kernels in ("eager", "fused")


def _optimizer_work(setup: Setup) -> WorkByTerm:
    """Return the work of AdamW on the heaviest stage's share of a rank."""
    shards = shard_ranks(setup) if setup.technique.zero_stage else 1
    return work_of(traffic=OPTIMIZER_TRAFFIC * heaviest_stage(setup) / shards / 1e12)
