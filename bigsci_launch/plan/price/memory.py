"""Memory of a rank on each stage: state, kept activations, working set, and what the allocator adds.

There are two figures. `need_gib` is in use at some moment of the step. `predicted_gib` is what nvidia-smi shows, which
is more because the allocator keeps freed blocks. It returns them when memory gets short, so only the need decides
whether a rank runs out.

What `bsl train` needs is counted tensor by tensor (`own_memory.py`), and no constant weighs it. What other programs
keep is counted too (`program_memory.py`); constants weigh it, and measured runs correct them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bigsci_launch.plan.price.constants import PRIOR, Constants
from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.price.held import expert_shard_ranks, expert_weights, layer_weights, shard_ranks
from bigsci_launch.plan.price.own_memory import OwnStage, is_own
from bigsci_launch.plan.price.program_memory import ProgramStage, error_of_need
from bigsci_launch.plan.shape.parameters import count_position_parameters
from bigsci_launch.plan.shape.setup import OPTIMIZER_BYTES, Setup

GIB = 2.0**30

MemoryFit = Literal["fits", "tight", "doubtful", "does not fit"]
"""Whether a rank has enough memory: `tight` if it has, by less than the error of the estimate; `doubtful` if it has
not, by less than that error."""

SAFE: tuple[MemoryFit, ...] = ("fits", "tight")
"""Of these, a rank needs no more than the GPU has."""

KNOWN_ERROR = 0.02
"""Relative error of a need that was counted for `bsl train`, or corrected by measured runs."""

FRAGMENTS = 0.05
"""Share of kept activations that the allocator cannot give back, because a part of their blocks is in use. Not with
kernels of 2021: BLOOM's shortages, and its runs that had enough, agree with the need without it."""

SQUEEZED_SHARE = 0.97
"""Share of the memory that the allocator fills with freed blocks."""

TIGHT_SHARE = 0.94
"""Share of the memory above which a plan counts as tight, however well the need is known."""

PROCESS_GIB = 1.0
"""What a rank of `bsl train` takes besides torch's pool: its CUDA context, kernels, NCCL. A guess."""

COUNTED = replace(PRIOR, base_gib=PROCESS_GIB, optimizer_bytes=OPTIMIZER_BYTES, activation_factor=1.0)
"""What weighs counted terms, whatever was measured: an fp32 master and two moments of each parameter."""


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """Memory of one stage before the constants weigh it; the optimizer in GiB per byte of state per parameter.
    `freed_gib` are blocks that torch keeps although they are free, if the terms are counted. Where the program sets
    `expandable_segments`, as torchtitan's launcher does, there are none. `fragments` is the share of what is kept that
    is needed on top of it, and `gathered_gib` is kept unless memory gets short."""

    resident_gib: float
    optimizer_gib_per_byte: float
    kept_gib: float
    working_gib: float
    freed_gib: float | None = None
    is_unfragmented: bool = False
    fragments: float = 0.0
    gathered_gib: float = 0.0

    def weights(self, constants: Constants) -> Constants:
        """Return what weighs these terms: `constants`, unless they are counted."""
        if self.freed_gib is not None:
            return COUNTED
        return replace(constants, activation_factor=1.0) if self.is_unfragmented else constants

    def state_gib(self, constants: Constants) -> float:
        """Return weights, gradients and optimizer state."""
        return self.resident_gib + self.optimizer_gib_per_byte * self.weights(constants).optimizer_bytes


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one rank of a stage, GiB; of the need and of what nvidia-smi shows, `process_gib` is not torch's."""

    stage: int
    state_gib: float
    need_gib: float
    predicted_gib: float
    process_gib: float


def count_memory(setup: Setup, stage: int, num_layers: int | None = None) -> MemoryTerms:
    """Return what a rank of `stage` keeps with `num_layers` transformer layers; default: those that it has."""
    num_layers = setup.layers_per_stage[stage] if num_layers is None else num_layers
    technique, parameters = setup.technique, _parameters(setup, stage, num_layers)
    shared = _sharded_parameters(setup, parameters, num_layers)
    kind = OwnStage if is_own(setup) else ProgramStage
    part = kind(setup, stage, num_layers, parameters, shared, _in_flight(setup, stage))
    memory = part.count()
    stated = shared if technique.zero_stage else parameters
    terms = MemoryTerms(
        resident_gib=memory.weights_and_gradients / GIB,
        optimizer_gib_per_byte=stated * technique.optimizer_bytes / OPTIMIZER_BYTES / GIB,
        kept_gib=memory.kept / GIB,
        working_gib=memory.working / GIB,
    )
    if isinstance(part, OwnStage):
        return replace(terms, freed_gib=part.freed() / GIB)
    is_unfragmented = setup.framework == "torchtitan"
    return replace(
        terms,
        is_unfragmented=is_unfragmented,
        fragments=0.0 if is_unfragmented or setup.has_kernels_of_2021 else FRAGMENTS,
        gathered_gib=_gathered_inputs(setup, num_layers) / GIB,
    )


def _gathered_inputs(setup: Setup, num_layers: int) -> float:
    """Return the bytes of the inputs of a layer's two products that tensor-parallel ranks have gathered. Eager programs
    with overlap keep them for the backward pass, or gather them again; published runs without a pipeline keep them."""
    if not setup.has_eager_overlap or setup.topology.pp > 1:
        return 0.0
    return 2 * num_layers * setup.element_bytes * (setup.stream_elements - setup.stream_part)


def _in_flight(setup: Setup, stage: int) -> float:
    """Return the micro batches that a stage keeps at the same time: with 1F1B one for each stage from here to the end.
    Interleaved, a chunk of the layers is kept for each forward pass before the first backward one."""
    pp, chunks = setup.topology.pp, setup.technique.chunks_per_rank
    kept = pp - stage if chunks == 1 else (2 * (pp - stage - 1) + (chunks - 1) * pp + 1) / chunks
    return min(setup.num_micro_batches, kept)


def _sharded_parameters(setup: Setup, parameters: float, num_layers: int) -> float:
    """Return the parameters whose sharded state a rank holds."""
    experts = num_layers * expert_weights(setup)
    return (parameters - experts) / shard_ranks(setup) + experts / expert_shard_ranks(setup)


def _parameters(setup: Setup, stage: int, num_layers: int) -> float:
    """Return the parameters of a rank of `stage` with `num_layers` layers; counts layers and tables, the rest is
    tiny."""
    h, tp, last = setup.shape.hidden_size, setup.topology.tp, setup.topology.pp - 1
    vectors = 9 * h + setup.shape.ffn_hidden_size if setup.shape.biases else 2 * h
    count = num_layers * (layer_weights(setup) + vectors / tp)
    if stage in (0, last):
        count += setup.shape.padded_vocab_size(tp) / tp * h
    if stage == last == 0 and not setup.shape.tied_embeddings:
        count += setup.shape.padded_vocab_size(tp) / tp * h
    if stage == 0:
        count += count_position_parameters(setup.shape)
    return count


def weigh_memory(terms: MemoryTerms, constants: Constants, gpu: GpuModel) -> tuple[float, float]:
    """Return the needed memory and what nvidia-smi will show, in GiB."""
    constants = terms.weights(constants)
    fixed = (
        constants.base_gib
        + terms.resident_gib
        + terms.optimizer_gib_per_byte * constants.optimizer_bytes
        + terms.working_gib
    )
    need = fixed + terms.kept_gib * min(1 + terms.fragments, constants.activation_factor)
    slack = fixed + terms.kept_gib * constants.activation_factor - need if terms.freed_gib is None else terms.freed_gib
    slack += terms.gathered_gib
    return need, need + min(slack, max(0.0, SQUEEZED_SHARE * gpu.memory_gib - need))


def predict_stage_memory(setup: Setup, stage: int, constants: Constants, gpu: GpuModel) -> StageMemory:
    terms = count_memory(setup, stage)
    need, predicted = weigh_memory(terms, constants, gpu)
    return StageMemory(stage, terms.state_gib(constants), need, predicted, terms.weights(constants).base_gib)


def judge_fit(setup: Setup, need_gib: float, gpu: GpuModel, *, is_known: bool) -> MemoryFit:
    """Return whether the need of a rank fits, with the error of an estimate for its program, which is small if the need
    `is_known`: counted, or corrected by measured runs."""
    error, share = KNOWN_ERROR if is_known else error_of_need(setup), need_gib / gpu.memory_gib
    if share > 1:
        return "doubtful" if share <= 1 + error else "does not fit"
    return "tight" if share > min(TIGHT_SHARE, 1 / (1 + error)) else "fits"


def outer_stages(setup: Setup) -> tuple[int, ...]:
    """Return the first and the last stage. One of them is the fullest, and nvidia-smi was read on them."""
    last = setup.topology.pp - 1
    return (0,) if last == 0 else (0, last)
