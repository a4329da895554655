"""TFLOP/s of one GPU, in the two conventions used by logs of this model family.

Logs before 2022-02-21 count 2 FLOPs per layer weight and pass; later logs also count attention and the head
(Narayanan et al., arXiv 2104.04473, equation 3). The newer figure is about 4 % higher for models of 200B parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from bigsci_launch.plan.shape.parameters import ModelShape, active_layer_matrices, active_layer_parameters
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
    """Return the FLOPs of a step, 2 per layer weight, token and pass; `passes` is 4 with recomputation, else 3.

    Of experts, those count that a token visits.
    """
    weights = shape.num_layers * active_layer_parameters(shape)
    return 2.0 * passes * weights * num_samples * shape.sequence_length


def full_flops(shape: ModelShape, tp: int, num_samples: int, passes: float = 4, *, scores_again: int = 0) -> float:
    """Return FLOPs with attention and head: 24 x passes x B s L h^2 (1 + s / 6h) + 6 B s h V for an MLP of 4h.

    The head is never recomputed. The formula as printed, with V / 16Lh in the bracket, is the same for 4 passes.
    Attention counts over the whole square of scores, as in Megatron's logs, torchtitan's and PaLM's MFU, although a
    causal kernel computes half of it. `scores_again` adds forward passes of attention alone (selective recomputation).
    """
    h, s = shape.hidden_size, shape.sequence_length
    scores = 4 * s * shape.query_size
    layer = passes * (2 * active_layer_matrices(shape) + scores) + scores_again * scores
    head = 6 * h * shape.padded_vocab_size(tp)
    return float(num_samples * s * (shape.num_layers * layer + head))


MODEL_PASSES = 3
"""Passes of a step that make progress: forward, and two backward."""


def model_flops(setup: Setup) -> float:
    """Return the FLOPs of a step that the model needs, on all GPUs: what recomputation repeats is no progress."""
    return full_flops(setup.shape, setup.topology.tp, setup.global_batch_size, MODEL_PASSES)


def hardware_flops(setup: Setup) -> float:
    """Return the FLOPs of a step that the GPUs compute together, with what is recomputed."""
    again = int(setup.technique.recomputation == "selective")
    return full_flops(setup.shape, setup.topology.tp, setup.global_batch_size, setup.num_passes, scores_again=again)


def tflops_of(setup: Setup, seconds: float) -> Tflops:
    """Return the TFLOP/s of one GPU in a step of `seconds`, with what is recomputed."""
    per_gpu = seconds * setup.topology.world_size * 1e12
    return Tflops(
        weights=weight_flops(setup.shape, setup.global_batch_size, setup.num_passes) / per_gpu,
        full=hardware_flops(setup) / per_gpu,
    )
