"""The ten constants of the model: their meaning, and their prior values and spreads before anything is measured.

All are positive, so their logarithms are fitted: `spread` is the standard deviation of the natural logarithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Constants:
    """One value for every constant; see `CONSTANTS` for units."""

    gemm_efficiency: float
    layer_overhead_ms: float
    hbm_tb_per_s: float
    nvlink_gb_per_s: float
    network_gb_per_s: float
    misaligned_heads: float
    drift: float
    base_gib: float
    optimizer_bytes: float
    activation_factor: float

    @classmethod
    def of_values(cls, values: Mapping[str, float]) -> Constants:
        """Return constants with these values; a missing one gets its prior."""
        return cls(**{constant.name: float(values.get(constant.name, constant.prior)) for constant in CONSTANTS})

    def as_dict(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Constant:
    """What is known of a constant before it is fitted."""

    name: str
    unit: str
    meaning: str
    prior: float
    spread: float


CONSTANTS: tuple[Constant, ...] = (
    Constant("gemm_efficiency", "of peak", "part of the GPU's peak that matrix products reach", 0.84, 0.3),
    Constant("layer_overhead_ms", "ms", "launches and waits per layer and micro batch", 3.4, 1.0),
    Constant("hbm_tb_per_s", "TB/s", "memory bandwidth of norms, softmax, dropout, GELU, gradients", 0.95, 0.5),
    Constant("nvlink_gb_per_s", "GB/s", "tensor-parallel all-reduce inside a node", 133.0, 0.7),
    Constant("network_gb_per_s", "GB/s", "gradients and weights between nodes, per node", 12.0, 1.0),
    Constant("misaligned_heads", "times", "attention products if the head size is not a multiple of 8", 22.0, 0.7),
    Constant("drift", "times", "step time after the day on which the cluster changed", 1.0, 0.05),
    Constant("base_gib", "GiB", "context, kernels and communication buffers of a rank", 8.0, 1.0),
    Constant("optimizer_bytes", "B", "optimizer state per parameter, divided over dp", 14.0, 0.3),
    Constant("activation_factor", "times", "kept activations with allocator slack, relative to their size", 1.2, 0.3),
)
TIME_CONSTANTS = tuple(constant.name for constant in CONSTANTS[:7])
MEMORY_CONSTANTS = tuple(constant.name for constant in CONSTANTS[7:])
PRIOR = Constants.of_values({})
