"""The constants of the model: their meaning, and what is expected of them before anything is measured.

All are positive, so their logarithms are fitted: `spread` is the standard deviation of the natural logarithm. What is
expected of a rate is a share of what the GPU or its network could do at best (`priors_for`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

from bigsci_launch.plan.price.hardware import A100, GpuModel


@dataclass(frozen=True, slots=True)
class Constants:
    """One value for every constant; see `CONSTANTS` for units."""

    gemm_efficiency: float
    attention_efficiency: float
    layer_overhead_ms: float
    hbm_tb_per_s: float
    nvlink_gb_per_s: float
    network_gb_per_s: float
    message_us: float
    misaligned_heads: float
    drift: float
    base_gib: float
    optimizer_bytes: float
    activation_factor: float

    @classmethod
    def of_values(cls, values: Mapping[str, float]) -> Constants:
        """Return constants with these values; a missing one gets what is expected of an A100."""
        return cls(**{constant.name: float(values.get(constant.name, constant.prior)) for constant in CONSTANTS})

    def as_dict(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Constant:
    """What is known of a constant before it is fitted. `prior` is that of an A100 whose nodes send 50 GB/s. No fit goes
    below `least` or above `most`."""

    name: str
    unit: str
    meaning: str
    prior: float
    spread: float
    least: float = 0.0
    most: float = math.inf


CONSTANTS: tuple[Constant, ...] = (
    Constant("gemm_efficiency", "of peak", "part of the GPU's peak that matrix products reach", 0.8, 0.3),
    Constant("attention_efficiency", "of peak", "part of the peak that fused attention reaches", 0.36, 0.4),
    Constant("layer_overhead_ms", "ms", "launches and waits per layer and micro batch", 3.4, 1.0),
    Constant("hbm_tb_per_s", "TB/s", "memory bandwidth of norms, softmax, dropout, GELU, gradients", 1.0, 0.5),
    Constant("nvlink_gb_per_s", "GB/s", "tensor-parallel all-reduce inside a node", 150.0, 0.7),
    Constant("network_gb_per_s", "GB/s", "gradients and weights between nodes, per node", 12.0, 1.0),
    Constant("message_us", "us", "a message of a collective from node to node", 6.0, 1.0),
    Constant("misaligned_heads", "times", "attention products if the head size is not a multiple of 8", 22.0, 0.7),
    Constant("drift", "times", "step time after the day on which the cluster changed", 1.0, 0.05),
    Constant("base_gib", "GiB", "context, kernels and communication buffers of a rank", 2.5, 1.0, 0.25, 16),
    # From a 32-bit master with two 16-bit moments to all three in 32 bits with a gradient and a copy.
    Constant("optimizer_bytes", "B", "optimizer state per parameter, divided over dp", 12.0, 0.3, 8, 20),
    # Activations are counted, so an allocator can only add to them.
    Constant(
        "activation_factor", "times", "kept activations with allocator slack, relative to their size", 1.15, 0.3, 1, 2
    ),
)
MEMORY_CONSTANTS = ("base_gib", "optimizer_bytes", "activation_factor")
TIME_CONSTANTS = tuple(constant.name for constant in CONSTANTS if constant.name not in MEMORY_CONSTANTS)
PRIOR = Constants.of_values({})

HBM_SHARE = PRIOR.hbm_tb_per_s / A100.hbm_tb_per_s
"""Share of the nominal memory bandwidth that the counted bytes see: about half, because kernels also move others."""

NVLINK_SHARE = PRIOR.nvlink_gb_per_s / A100.nvlink_gb_per_s
"""Share of the nominal NVLink rate, in the units of the all-reduce: 0.78 of it reach NCCL's bus bandwidth."""

HOPPER_NVLINK_GAIN = 1.3
"""How much more of it Hopper reaches, whose NVLink switches add up what an all-reduce sends (NVLink SHARP)."""
HOPPER = ("H100", "H200", "H800", "H20", "GH200")

NETWORK_SHARE = 0.75
"""Share of the nominal network rate that the gradients of many ranks reach: near three quarters on most published
runs, 0.24 on Jean Zay's Omni-Path in 2022. Hence the wide spread."""

# Shares of the dense bf16 peak that matrix products and fused attention reach, by the GPU's name or its beginning. The
# faster a GPU, the less of its peak its memory, its power limit and its kernels leave.
_EFFICIENCIES = {
    "V100": (0.75, 0.35),
    "A100": (PRIOR.gemm_efficiency, PRIOR.attention_efficiency),
    "H100": (0.74, 0.32),
    "H100-SXM5-96GB": (0.62, 0.28),  # those of the published runs have 500 W
    "H200": (0.74, 0.32),
    "GH200": (0.74, 0.32),
    "B200": (0.47, 0.55),
    "GB200": (0.57, 0.50),
    "B300": (0.57, 0.50),
    "GB300": (0.57, 0.50),
    "MI250X": (0.48, 0.25),
    "MI300X": (0.45, 0.30),
    "MI355X": (0.55, 0.30),
}
# What no published run shows is that of its relative.
_RELATIVES = {"A800": "A100", "H800": "H100", "H20": "H100", "MI325X": "MI300X", "MI350X": "MI355X"}
_UNKNOWN_EFFICIENCIES = (0.65, 0.40)


@lru_cache(maxsize=64)
def priors_for(gpu: GpuModel) -> Constants:
    """Return what is expected of a GPU and its network before anything is measured."""
    family = _RELATIVES.get(gpu.family, gpu.family)
    gemm, attention = _EFFICIENCIES.get(gpu.name) or _EFFICIENCIES.get(family, _UNKNOWN_EFFICIENCIES)
    values = {
        "gemm_efficiency": gemm,
        "attention_efficiency": attention,
        "hbm_tb_per_s": HBM_SHARE * gpu.hbm_tb_per_s,
        "nvlink_gb_per_s": NVLINK_SHARE * gpu.nvlink_gb_per_s * (HOPPER_NVLINK_GAIN if gpu.family in HOPPER else 1.0),
    }
    if gpu.network_gb_per_s:
        values["network_gb_per_s"] = NETWORK_SHARE * gpu.network_gb_per_s
    return Constants.of_values(values)
