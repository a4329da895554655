"""TFLOP/s of one GPU, in the two conventions used by logs of this model family.

Logs before 2022-02-21 count 2 FLOPs per layer weight and pass; later logs also count attention and the head
(Narayanan et al., arXiv 2104.04473, equation 3). The newer figure is about 4 % higher for models of 200B parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from bigsci_launch.plan.shape.parameters import ModelShape, count_layer_parameters
from bigsci_launch.plan.shape.setup import Setup

CONVENTION_DAY = date(2022, 2, 21)
"""First day of the newer convention in the measured rows."""


@dataclass(frozen=True, slots=True)
class Tflops:
    """TFLOP/s of one GPU: `weights` in the older convention, `full` in the newer."""

    weights: float
    full: float

    def of_day(self, day: date | None) -> float:
        """Return the figure in the convention of `day`, or in the newer one without a day."""
        return self.weights if day and day < CONVENTION_DAY else self.full


def weight_flops(shape: ModelShape, num_samples: int, passes: float = 4) -> float:
    """Return the FLOPs of a step, 2 per layer weight, token and pass; `passes` is 4 with recomputation, else 3."""
    weights = shape.num_layers * count_layer_parameters(shape)
    return 2.0 * passes * weights * num_samples * shape.sequence_length


def full_flops(shape: ModelShape, tp: int, num_samples: int, passes: float = 4) -> float:
    """Return FLOPs with attention and head: 24 x passes x B s L h^2 (1 + s / 6h) + 6 B s h V for an MLP of 4h.

    The head is never recomputed. The formula as printed, with V / 16Lh in the bracket, is the same for 4 passes.
    """
    h, s = shape.hidden_size, shape.sequence_length
    layer = 2 * shape.layer_matrices + 4 * s * h
    head = 6 * h * shape.padded_vocab_size(tp)
    return float(num_samples * s * (passes * shape.num_layers * layer + head))


def tflops_of(setup: Setup, seconds: float) -> Tflops:
    """Return the TFLOP/s of one GPU in a step of `seconds`."""
    passes = setup.num_passes
    per_gpu = seconds * setup.topology.world_size * 1e12
    return Tflops(
        weights=weight_flops(setup.shape, setup.global_batch_size, passes) / per_gpu,
        full=full_flops(setup.shape, setup.topology.tp, setup.global_batch_size, passes) / per_gpu,
    )
