"""How fast a step is, in the figures of reports: tokens per second, TFLOP/s of the hardware and of the model, MFU."""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.plan.shape.tflops import hardware_flops, model_flops


@dataclass(frozen=True, slots=True)
class Throughput:
    """Figures of one GPU. `hardware_tflops` counts what is computed, with what is recomputed; `model_tflops` what the
    model needs. `mfu` is the share of the GPU's dense peak in the precision that the model uses; None: no peak is
    known."""

    tokens_per_second: float
    hardware_tflops: float
    model_tflops: float
    peak_tflops: float | None

    @property
    def mfu(self) -> float | None:
        return self.model_tflops / self.peak_tflops if self.peak_tflops else None


def throughput_of(setup: Setup, seconds: float, gpu: GpuModel) -> Throughput:
    per_gpu = seconds * setup.topology.world_size
    return Throughput(
        tokens_per_second=setup.global_batch_size * setup.shape.sequence_length / per_gpu,
        hardware_tflops=hardware_flops(setup) / per_gpu / 1e12,
        model_tflops=model_flops(setup) / per_gpu / 1e12,
        peak_tflops=peak_tflops(setup, gpu),
    )


def peak_tflops(setup: Setup, gpu: GpuModel) -> float | None:
    """Return the GPU's dense peak in the precision of `setup`; fp32 is computed in TF32, at half the 16-bit rate."""
    if setup.precision == "fp8":
        return gpu.fp8_tflops
    return gpu.peak_tflops / 2 if setup.precision == "fp32" else gpu.peak_tflops


def throughput_line(setup: Setup, gpu: GpuModel) -> str:
    """Return in words what the columns of throughput count."""
    peak = peak_tflops(setup, gpu)
    of = f"the {peak:g} TFLOP/s" if peak else "the unknown peak"
    return (
        "TFLOP/s counts what a GPU computes, with attention, head and what is recomputed (hardware FLOPs); MFU counts "
        f"the model's FLOPs, without what is recomputed, as a share of {of} of {setup.precision}"
    )
