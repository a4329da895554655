"""Counts the FLOPs of matrix products as the GPU computes them: in whole tiles and waves, and grouped by experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.shape.setup import Setup

# Output tiles (rows, columns) from which cuBLAS chooses. The best one counts, with its last wave over the GPU's
# multiprocessors rounded up.
_TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (256, 64))

FP8_SHARE, FP8_HALF_WIDTH = 1.04, 620
"""Efficiency of the fp8 products of very wide layers relative to that of bf16 products, and the width that halves it:
scaling and casts cost time per activation, and products per activation and width. Chosen on the same published runs
as `ExpertShare`, from Llama-3 8B to Nemotron-4 340B."""


_FP8_GAINS = {"B200": 1.2, "B300": 1.15, "GB300": 1.2}
"""What the fp8 products of newer GPUs reach beyond that, by the beginning of the GPU's name."""


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Efficiency of experts' products relative to that of one large product: `wide` that of very wide experts,
    `half_width` the width of an expert that halves it, `fp8` the factor on it in fp8."""

    wide: float
    half_width: int
    fp8: float

    def of(self, width: int, *, is_fp8: bool) -> float:
        """Return the share for experts of `width`, the hidden size of their MLP."""
        return self.wide / (1 + self.half_width / width) * (self.fp8 if is_fp8 else 1.0)


_EXPERTS = ExpertShare(0.8, 1200, 0.7)
_EXPERTS_ON_BLACKWELL = ExpertShare(0.7, 300, 1.0)
_BLACKWELL = ("B200", "GB200", "B300", "GB300")
"""Where narrow experts and fp8 cost less, probably because one kernel does the products of all experts. Both shares
were chosen on published runs of Grok-1, Mixtral, Qwen3 and GPT-OSS (`benchmarks/plan_external.py`)."""


def dense_products(setup: Setup, gpu: GpuModel, forwards: float) -> float:
    """Return the FLOPs of attention's matrices and of the MLP, or of the share of layers that has one."""
    shape, tp, tokens = setup.shape, setup.topology.tp, setup.tokens_per_micro_batch
    h, query, inputs = shape.hidden_size, shape.query_size, shape.mlp_inputs
    products = [(1.0, (query + 2 * shape.key_value_size) // tp, h), (1.0, h, query // tp)]
    dense = 1 - shape.expert_layers / shape.num_layers
    widths = [(dense, shape.ffn_hidden_size)]
    if shape.experts and shape.experts.shared_ffn_hidden_size:
        widths.append((1 - dense, shape.experts.shared_ffn_hidden_size))
    for share, width in widths if dense < 1 else widths[:1]:
        products += [(share, inputs * width // tp, h), (share, h, max(1, width // tp))]
    return sum(
        share * trained_product(tokens, columns, inner, forwards, gpu) for share, columns, inner in products if share
    )


def expert_products(setup: Setup, gpu: GpuModel, forwards: float) -> float:
    """Return the FLOPs of the experts of one rank, if tokens spread evenly. Ranks hold whole experts."""
    shape, experts = setup.shape, setup.shape.experts
    if experts is None:
        return 0.0
    tokens = setup.tokens_per_micro_batch / setup.topology.tp * experts.per_token * (experts.capacity_factor or 1.0)
    held = max(1, experts.count // setup.expert_shards)
    rows = max(1, round(tokens / held))
    width, h = experts.ffn_hidden_size, shape.hidden_size
    one = trained_product(rows, shape.mlp_inputs * width, h, forwards, gpu)
    one += trained_product(rows, h, width, forwards, gpu)
    share = _expert_share(gpu).of(width, is_fp8=setup.precision == "fp8" and bool(gpu.fp8_tflops))
    return shape.expert_layers / shape.num_layers * held * one / share


def _expert_share(gpu: GpuModel) -> ExpertShare:
    return _EXPERTS_ON_BLACKWELL if gpu.family in _BLACKWELL else _EXPERTS


def attention_peak(setup: Setup, gpu: GpuModel) -> float:
    """Return the peak FLOP/s of attention; fp32 runs at half the 16-bit rate (TF32)."""
    return gpu.peak_tflops * 1e12 / (2 if setup.precision == "fp32" else 1)


def product_peak(setup: Setup, gpu: GpuModel) -> float:
    """Return the peak FLOP/s of a layer's matrix products, in units of the efficiency of bf16."""
    if gpu.fp8_tflops and setup.precision == "fp8":
        share = FP8_SHARE * _FP8_GAINS.get(gpu.family, 1.0) / (1 + FP8_HALF_WIDTH / setup.shape.hidden_size)
        return share * gpu.fp8_tflops * 1e12
    return attention_peak(setup, gpu)


def trained_product(rows: int, columns: int, inner: int, forwards: float, gpu: GpuModel) -> float:
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
