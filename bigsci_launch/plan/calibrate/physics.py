"""Whether fitted constants are possible on the GPU that they were fitted for.

An efficiency above 1 means that the rows counted less work than the GPU did: they describe another model, or another
GPU. A rate above the nominal one means only that something else is faster than the model has it, so it is marked.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.errors import DataError
from bigsci_launch.plan.price.constants import CONSTANTS, Constants
from bigsci_launch.plan.price.hardware import GpuModel

EFFICIENCY = "of peak"
"""The unit of constants that are a part of the GPU's peak."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A constant beyond what the hardware can do: its value, the most that is possible, and the unit of both."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def is_impossible(self) -> bool:
        return self.unit == EFFICIENCY

    @property
    def text(self) -> str:
        if self.is_impossible:
            return f"{self.name} is {self.value:.3g} of the GPU's peak, which is impossible"
        return f"{self.name} is {self.value:.3g} {self.unit}, above the nominal {self.limit:g} {self.unit}"


def find_excesses(constants: Constants, gpu: GpuModel) -> list[Excess]:
    """Return the constants that the hardware cannot reach, in the order of `CONSTANTS`.

    A rate is compared with the nominal figure of the same name, unless that is not given.
    """
    found = []
    for constant in CONSTANTS:
        value = getattr(constants, constant.name)
        limit = 1.0 if constant.unit == EFFICIENCY else _nominal(constant.name, gpu)
        if limit is not None and value > limit:
            found.append(Excess(constant.name, value, limit, constant.unit))
    return found


def _nominal(name: str, gpu: GpuModel) -> float | None:
    figure: float | None = getattr(gpu, name, None) if name not in gpu.assumed else None
    return figure


def require_possible(constants: Constants, gpu: GpuModel) -> None:
    """Check that no efficiency is above 1.

    Raises:
        DataError: one is; names the constant and its value.
    """
    impossible = [excess for excess in find_excesses(constants, gpu) if excess.is_impossible]
    if impossible:
        texts = "; ".join(excess.text for excess in impossible)
        peak = f"{gpu.name}, {gpu.peak_tflops:g} TFLOP/s" + (" (assumed)" if "peak_tflops" in gpu.assumed else "")
        raise DataError(
            f"not a calibration: {texts} ({peak})",
            hint="the rows probably count another model, such as more layers, attention or recomputation than ran, or "
            "another GPU",
        )
