"""Memory of a rank on each stage: state, kept activations, working set, and what the allocator adds.

There are two figures. `need_gib` is in use at some moment of the step. `predicted_gib` is what nvidia-smi shows, which
is more because the allocator keeps freed blocks. It returns them when memory gets short, so only the need decides
whether a rank runs out.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.plan.price.constants import Constants
from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.shape.parameters import count_position_parameters
from bigsci_launch.plan.shape.setup import Setup

GIB = 2.0**30

FP32_GRADIENT_BYTES = 5.0
"""Bytes per parameter of fp32 gradient accumulators: 4, plus waste in their flat buffers (5.1 were measured)."""

OOM_MARGIN = 0.02
"""Share by which the need must exceed the memory to count as out of memory: the model's error near the limit."""

GUESSED_OOM_MARGIN = 0.1
"""The same if no memory was measured on the cluster."""

SQUEEZED_SHARE = 0.97
"""Share of the memory that the allocator fills with freed blocks."""

TIGHT_SHARE = 0.94
"""Share of the memory above which a plan counts as tight."""


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """Memory of one stage before the constants weigh it; the optimizer in GiB per byte of state per parameter."""

    resident_gib: float
    optimizer_gib_per_byte: float
    kept_gib: float
    working_gib: float


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one rank of a stage, GiB."""

    stage: int
    state_gib: float
    need_gib: float
    predicted_gib: float


def count_memory(setup: Setup, stage: int, num_layers: int | None = None) -> MemoryTerms:
    """Return what a rank of `stage` keeps with `num_layers` transformer layers; default: those that it has.

    1F1B keeps one micro batch for each stage from here to the end. With recomputation, each is one input per layer,
    plus one layer's activations while they are recomputed (Korthikanti et al., arXiv 2205.05198, section 4).
    """
    shape, topology = setup.shape, setup.topology
    h, tp = shape.hidden_size, topology.tp
    num_layers = setup.layers_per_stage[stage] if num_layers is None else num_layers
    is_last = stage == topology.pp - 1
    in_flight = min(setup.num_micro_batches, topology.pp - stage)
    parameters = _parameters(setup, stage, num_layers)
    stream = setup.tokens_per_micro_batch * h
    scores = shape.num_attention_heads * shape.sequence_length**2 * setup.micro_batch_size / tp
    one_layer = (stream * (10 + 24 / tp) + _changed_bytes(setup) / tp + 5 * scores) * (setup.element_bytes / 2)
    kept = (
        in_flight
        * num_layers
        * (setup.element_bytes * stream if setup.technique.recomputation == "full" else one_layer)
    )
    recomputed = one_layer if setup.technique.recomputation == "full" else 0.0
    logits = 2 * setup.tokens_per_micro_batch * shape.padded_vocab_size(tp) / tp if is_last else 0.0
    gradients = FP32_GRADIENT_BYTES if setup.has_fp32_gradients and setup.precision != "fp32" else 0.0
    return MemoryTerms(
        resident_gib=parameters * (2 * setup.element_bytes + gradients) / GIB,
        optimizer_gib_per_byte=parameters / (topology.dp if setup.technique.zero_stage else 1) / GIB,
        kept_gib=kept / GIB,
        working_gib=(recomputed + logits + in_flight * setup.element_bytes * stream) / GIB,
    )


def _changed_bytes(setup: Setup) -> int:
    """Return what a layer keeps in 16 bits beyond a GELU layer in which every head has its own keys and values.

    Shared keys and values are narrower. A gate doubles what the MLP keeps: its two products, SiLU of one, and the
    result, instead of one product and GELU of it.
    """
    shape = setup.shape
    narrower = 4 * (shape.hidden_size - shape.key_value_size)
    return setup.tokens_per_micro_batch * (4 * (shape.mlp_inputs - 1) * shape.ffn_hidden_size - narrower)


def _parameters(setup: Setup, stage: int, num_layers: int) -> float:
    """Return the parameters of a rank of `stage` with `num_layers` layers; counts layers and tables, the rest is
    tiny."""
    h, tp, last = setup.shape.hidden_size, setup.topology.tp, setup.topology.pp - 1
    ffn = setup.shape.ffn_hidden_size
    count = num_layers * (setup.shape.layer_matrices + 9 * h + ffn) / tp
    if stage in (0, last):
        count += setup.shape.padded_vocab_size(tp) / tp * h
    if stage == 0:
        count += count_position_parameters(setup.shape)
    return count


def weigh_memory(terms: MemoryTerms, constants: Constants, gpu: GpuModel) -> tuple[float, float]:
    """Return the needed memory and what nvidia-smi will show, in GiB."""
    fixed = (
        constants.base_gib
        + terms.resident_gib
        + terms.optimizer_gib_per_byte * constants.optimizer_bytes
        + terms.working_gib
    )
    need = fixed + terms.kept_gib * min(1.0, constants.activation_factor)
    slack = fixed + terms.kept_gib * constants.activation_factor - need
    return need, need + min(slack, max(0.0, SQUEEZED_SHARE * gpu.memory_gib - need))


def predict_stage_memory(setup: Setup, stage: int, constants: Constants, gpu: GpuModel) -> StageMemory:
    """Return the memory of a rank of `stage`."""
    terms = count_memory(setup, stage)
    need, predicted = weigh_memory(terms, constants, gpu)
    return StageMemory(
        stage, terms.resident_gib + terms.optimizer_gib_per_byte * constants.optimizer_bytes, need, predicted
    )


def is_out_of_memory(need_gib: float, gpu: GpuModel, *, is_measured: bool) -> bool:
    """Return whether the need exceeds the GPU's memory by more than the model's error, larger if none was measured."""
    return need_gib > gpu.memory_gib * (1 + (OOM_MARGIN if is_measured else GUESSED_OOM_MARGIN))


def outer_stages(setup: Setup) -> tuple[int, ...]:
    """Return the first and the last stage. One of them is the fullest, and nvidia-smi was read on them."""
    last = setup.topology.pp - 1
    return (0,) if last == 0 else (0, last)
