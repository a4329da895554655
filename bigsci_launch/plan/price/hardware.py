"""What the planner knows about an accelerator and about the network of its nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuModel:
    """An accelerator as one rank sees it. Rates are nominal.

    `peak_tflops` is that of dense bf16, `fp8_tflops` that of dense fp8 (None: it has none, or it is not known).
    `nvlink_gb_per_s` is what one GPU can send to the others of its node, `network_gb_per_s` what all adapters of a node
    can send together (None: nobody said). `assumed` names the figures that nobody gave.
    """

    name: str
    memory_gib: float
    peak_tflops: float
    fp8_tflops: float | None = None
    hbm_tb_per_s: float = 2.039
    num_multiprocessors: int = 108
    nvlink_gb_per_s: float = 300.0
    network_gb_per_s: float | None = None
    assumed: tuple[str, ...] = ()


A100 = GpuModel("A100-SXM4-80GB", 79.15, 312.0)
