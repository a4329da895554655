"""Predicts the time of a step: a pipeline of stages, each a sum of work divided by measured rates.

    T = drift x [ (m - 1) x (slowest stage + hop) + sum of stages + (pp - 1) x hop + gradients + 0.3 s ]

with m micro batches per replica. Kernel launches add to a layer's time if the host waits for every launch; otherwise
they overlap with the GPU's work. A stage is its layers, and the last one has the head too; the input embedding costs
memory, not time. All work is counted once per setup (`StepWork`) and the constants only weigh it, so fitting and
searching are fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from bigsci_launch.plan.price.constants import Constants
from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.shape.parameters import count_layer_parameters
from bigsci_launch.plan.shape.setup import Setup

TERMS = (
    "matrix products",
    "launch overhead",
    "memory traffic",
    "tensor-parallel all-reduce",
    "network",
    "misaligned heads",
)
"""What time is spent on. Work and rates are in this order."""

WorkByTerm = tuple[float, float, float, float, float, float]
NO_WORK: WorkByTerm = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

STEP_CONSTANT_S = 0.3
"""Seconds of a step outside the pipeline: optimizer arithmetic, clipping, the log line."""

LAUNCH_NORM = 4
"""Without blocking, a layer takes the norm of this order of launch time and GPU time: nearly the longer of the two."""

HOP_SPEEDUP = 4.0
"""Rate of point-to-point messages relative to the gradient collectives: 3.8 and 6 when fitted separately."""

# Output tiles (rows, columns) from which cuBLAS chooses. The best one counts, with its last wave over the GPU's
# multiprocessors rounded up.
_TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (256, 64))

# Bytes that memory-bound kernels move per element in the forward and in the backward pass, 16-bit activations:
# attention scores (softmax, dropout), the residual stream (norms, dropout, adds), the MLP's inside (GELU), the logits.
_SCORE_BYTES, _STREAM_BYTES, _INNER_BYTES, _LOGIT_BYTES = (13, 10), (25, 20), (6, 8), 20


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a setup: per layer and micro batch, of the head, of a hop between stages, and once per step."""

    layer: WorkByTerm
    head: WorkByTerm
    hop: WorkByTerm
    step: WorkByTerm
    layers_per_stage: tuple[int, ...]
    num_micro_batches: int
    day_ordinal: int | None
    is_blocking: bool


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted step: seconds in total, per term, and per stage and micro batch; what one more micro batch adds; and
    `bubble`, the share of time that the slowest stage is idle."""

    seconds: float
    terms: tuple[float, ...]
    stage_seconds: tuple[float, ...]
    micro_batch_seconds: float
    bubble: float


def count_work(setup: Setup, gpu: GpuModel) -> StepWork:
    """Return the work of one step of `setup`.

    Raises:
        ValueError: the layers cannot be cut into stages.
    """
    return StepWork(
        layer=_layer_work(setup, gpu),
        head=_head_work(setup, gpu),
        hop=_hop_work(setup),
        step=_gradient_work(setup),
        layers_per_stage=setup.layers_per_stage,
        num_micro_batches=setup.num_micro_batches,
        day_ordinal=setup.day.toordinal() if setup.day else None,
        is_blocking=setup.has_blocking_launches,
    )


def _layer_work(setup: Setup, gpu: GpuModel) -> WorkByTerm:
    """Return the work of one layer and micro batch: forward (twice with recomputation) and backward."""
    shape, tp, tokens = setup.shape, setup.topology.tp, setup.tokens_per_micro_batch
    h, ffn, qkv = shape.hidden_size, shape.ffn_hidden_size, shape.hidden_size + 2 * shape.key_value_size
    forwards = 2 if setup.technique.recomputation == "full" else 1
    products = sum(
        _trained_product(tokens, columns, inner, forwards, gpu)
        for columns, inner in ((qkv // tp, h), (h, h // tp), (shape.mlp_inputs * ffn // tp, h), (h, ffn // tp))
    )
    scores = shape.sequence_length**2 * shape.num_attention_heads * setup.micro_batch_size / tp
    attention = 4 * scores * shape.head_dim * (forwards + 2) / _peak(setup, gpu)
    aligned = shape.head_dim % 8 == 0
    traffic = (
        scores * _both(_SCORE_BYTES, forwards)
        + tokens * h * _both(_STREAM_BYTES, forwards)
        + tokens * ffn * (shape.mlp_inputs + 1) / 2 / tp * _both(_INNER_BYTES, forwards)
    ) * (setup.element_bytes / 2)
    accumulation = (12 if setup.has_fp32_gradients else 6) * shape.layer_matrices / tp
    all_reduced = (2 * forwards + 2) * tokens * h * setup.element_bytes * (tp - 1) / tp * 8 / 7
    return (
        products / _peak(setup, gpu) + (attention if aligned else 0.0),
        1e-3,
        (traffic + accumulation) / 1e12,
        all_reduced / 1e9,
        0.0,
        0.0 if aligned else attention,
    )


def _both(forward_backward: tuple[int, int], forwards: int) -> int:
    return forward_backward[0] * forwards + forward_backward[1]


def _peak(setup: Setup, gpu: GpuModel) -> float:
    """Return the peak FLOP/s of matrix products; fp32 runs at half the 16-bit rate (TF32)."""
    return gpu.peak_tflops * 1e12 / (2 if setup.precision == "fp32" else 1)


def _head_work(setup: Setup, gpu: GpuModel) -> WorkByTerm:
    """Return the work of the product with the vocabulary and of the logits, which are never recomputed."""
    tokens, columns = (
        setup.tokens_per_micro_batch,
        setup.shape.padded_vocab_size(setup.topology.tp) // setup.topology.tp,
    )
    products = _trained_product(tokens, columns, setup.shape.hidden_size, 1, gpu)
    return (products / _peak(setup, gpu), 0.0, _LOGIT_BYTES * tokens * columns / 1e12, 0.0, 0.0, 0.0)


def _hop_work(setup: Setup) -> WorkByTerm:
    """Return the work of sending activations to the next stage and gradients back; every rank sends all of them."""
    if setup.topology.pp == 1:
        return NO_WORK
    sent = 2 * setup.tokens_per_micro_batch * setup.shape.hidden_size * setup.element_bytes * 8
    return (0.0, 0.0, 0.0, 0.0, sent / HOP_SPEEDUP / 1e9, 0.0)


def _gradient_work(setup: Setup) -> WorkByTerm:
    """Return the work of reducing gradients and gathering weights over dp: 6 bytes per parameter of the heaviest stage.

    Rings of different tensor ranks share the links of a node. Replicas inside one node need no link.
    """
    dp, tp = setup.topology.dp, setup.topology.tp
    if dp == 1:
        return NO_WORK
    layers, layer = setup.layers_per_stage, count_layer_parameters(setup.shape) / tp
    table = setup.shape.padded_vocab_size(tp) // tp * setup.shape.hidden_size
    heaviest = max(layers[0] * layer + table, max(layers) * layer, layers[-1] * layer + table)
    rings = setup.ranks_per_node / min(dp, max(1, setup.ranks_per_node / tp))
    return (0.0, 0.0, 0.0, 0.0, 6 * heaviest * (dp - 1) / dp * rings / 1e9, 0.0)


def _trained_product(rows: int, columns: int, inner: int, forwards: int, gpu: GpuModel) -> float:
    """Return the FLOPs of (rows x inner) by (inner x columns): forward, gradient of the input and of the weight."""
    count = gpu.num_multiprocessors
    return (
        forwards * _tiled_flops(rows, columns, inner, count)
        + _tiled_flops(rows, inner, columns, count)
        + _tiled_flops(inner, columns, rows, count)
    )


@lru_cache(maxsize=65536)
def _tiled_flops(rows: int, columns: int, inner: int, num_multiprocessors: int) -> float:
    """Return the FLOPs of one product with the best tile, rounded up to whole tiles and whole waves of them."""
    waves = (
        (-(-math.ceil(rows / high) * math.ceil(columns / wide) // num_multiprocessors)) * high * wide
        for high, wide in _TILES
    )
    return 2.0 * min(waves) * num_multiprocessors * inner


def rates_of(constants: Constants) -> tuple[float, ...]:
    """Return the seconds per unit of work, in the order of `TERMS`."""
    return (
        1 / constants.gemm_efficiency,
        constants.layer_overhead_ms,
        1 / constants.hbm_tb_per_s,
        1 / constants.nvlink_gb_per_s,
        1 / constants.network_gb_per_s,
        constants.misaligned_heads,
    )


def drift_on(day_ordinal: int | None, drift: float, drift_from: int | None) -> float:
    """Return the factor on a day: `drift` from `drift_from` on, and without a day; else 1."""
    if drift_from is None:
        return 1.0
    return drift if day_ordinal is None or day_ordinal >= drift_from else 1.0


def step_seconds(work: StepWork, rates: tuple[float, ...]) -> float:
    """Return the seconds of a step before drift; the fast path of `predict_step`, for fitting."""
    r0, r1, r2, r3, r4, r5 = rates
    w0, w1, w2, w3, _, w5 = work.layer
    layer = _with_launches(w0 * r0 + w2 * r2 + w3 * r3 + w5 * r5, w1 * r1, work.is_blocking)
    head = work.head[0] * r0 + work.head[2] * r2
    hop = work.hop[4] * r4
    stages = work.layers_per_stage
    slowest = max(max(stages) * layer, stages[-1] * layer + head)
    pipeline = (work.num_micro_batches - 1) * (slowest + hop) + sum(stages) * layer + head + (len(stages) - 1) * hop
    return pipeline + work.step[4] * r4 + STEP_CONSTANT_S


def layer_and_head_seconds(work: StepWork, constants: Constants) -> tuple[float, float]:
    """Return the seconds of a layer and of the head per micro batch, before drift. They give the price of a stage."""
    rates = rates_of(constants)
    w0, w1, w2, w3, _, w5 = (amount * rate for amount, rate in zip(work.layer, rates, strict=True))
    head = sum(amount * rate for amount, rate in zip(work.head, rates, strict=True))
    return _with_launches(w0 + w2 + w3 + w5, w1, work.is_blocking), head


def _with_launches(working: float, launching: float, is_blocking: bool) -> float:
    """Return the seconds of a layer, given those of the GPU's work and of its launches."""
    if is_blocking:
        return working + launching
    return float((working**LAUNCH_NORM + launching**LAUNCH_NORM) ** (1 / LAUNCH_NORM))


def predict_step(work: StepWork, constants: Constants, drift_from: int | None = None) -> StepTime:
    """Return the step with all its terms. `drift_from` is the proleptic ordinal of the day on which `drift` begins."""
    rates, stages, m = rates_of(constants), work.layers_per_stage, work.num_micro_batches
    factor = drift_on(work.day_ordinal, constants.drift, drift_from)
    layer, head, hop, step = (
        [amount * rate for amount, rate in zip(part, rates, strict=True)]
        for part in (work.layer, work.head, work.hop, work.step)
    )
    working = sum(layer) - layer[1]
    layer[1] = _with_launches(working, layer[1], work.is_blocking) - working
    stage_seconds = [count * sum(layer) for count in stages]
    stage_seconds[-1] += sum(head)
    slowest = stage_seconds.index(max(stage_seconds))
    has_head = slowest == len(stages) - 1
    terms = [
        (m - 1) * (stages[slowest] * layer[i] + has_head * head[i] + hop[i])
        + sum(stages) * layer[i]
        + head[i]
        + (len(stages) - 1) * hop[i]
        + step[i]
        for i in range(len(TERMS))
    ]
    pipeline = (m - 1) * (stage_seconds[slowest] + sum(hop)) + sum(stage_seconds) + (len(stages) - 1) * sum(hop)
    return StepTime(
        seconds=(sum(terms) + STEP_CONSTANT_S) * factor,
        terms=tuple(term * factor for term in terms),
        stage_seconds=tuple(seconds * factor for seconds in stage_seconds),
        micro_batch_seconds=(stage_seconds[slowest] + sum(hop)) * factor,
        bubble=1 - m * (stage_seconds[slowest] + sum(hop)) / pipeline if pipeline else 0.0,
    )
