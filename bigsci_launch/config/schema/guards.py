"""Two sections of the run file: guards against defects, and faults to inject on purpose."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from bigsci_launch.config.schema.section import Section


class GuardsSection(Section):
    """Checks that the trainer makes on itself: copies that must be equal are equal to the last bit, and gradients are
    complete, the optimizer's state is one that AdamW can have. All of them run before the first step, in the first two
    steps, and before a save."""

    action: Literal["stop", "warn"] = "stop"
    """What happens on a violation: `stop` all ranks with an error before anything wrong is saved, or `warn` in the
    log."""

    interval: Literal["auto", "off"] | PositiveInt = "auto"
    """Steps between checks; a step whose result is saved is always checked. `auto`: as few as keep checks at 0.15 % of
    the training time, but no more than 100 steps and 5 minutes. `off`: no checks of copies, gradients and state at all,
    not even at load and save. With a number, a check also compares the whole state of the optimizer with its state
    after the previous step; with `auto`, up to 256 elements of each of its tensors, in every step."""

    max_skipped_steps: PositiveInt = 20
    """After this many steps in a row whose gradients were not finite, so that the optimizer skipped them, the run
    stops and names where that began. In fp16 a few are ordinary: each one halves the loss scale, which begins at 65536.
    A loss that is not finite always stops the run in its step. Both hold with `interval: off` too."""

    preflight: Literal["stop", "warn"] = "stop"
    """What happens with a layout that would hang or crash later. `stop` refuses it before the first step."""


MemoryPlace = Literal[
    "build",
    "load",
    "receive_activation",
    "forward",
    "collective",
    "loss",
    "backward",
    "receive_gradient",
    "accumulation",
    "tied_reduction",
    "reduction",
    "norm",
    "optimizer",
    "gather",
    "evaluation",
    "save",
]


class FaultSpec(Section):
    """A fault or a defect that `bsl train` injects on purpose, for tests and demonstrations."""

    kind: Literal[
        "hang",
        "skip",
        "die",
        "slow",
        "unreduced_tied_gradients",
        "passenger_norm",
        "decayed_norm",
        "tied_norm",
        "unclipped_tied_copy",
        "unreduced_tp_gradients",
        "scaled_gradients",
        "lost_random_states",
        "lost_optimizer_step",
        "flipped_byte",
        "out_of_memory",
    ]
    """Faults of one rank. `hang`: sleep forever before the step. `skip`: leave out one tensor-parallel all-reduce of
    the step (data-parallel if tp is 1). `die`: SIGKILL itself. `slow`: sleep `seconds` in every step from `step` on.
    `flipped_byte`: one bit of the rank's optimizer shard is wrong on disk in the checkpoint after `step`.
    `out_of_memory`: from `step` on, `place` runs out of memory if the micro-batches are larger than `above`. Defects of
    all ranks from `step` on. `unreduced_tied_gradients`: tied copies are not summed over stages. `unclipped_tied_copy`:
    the last stage's copy is not clipped (bf16). `unreduced_tp_gradients`: column-parallel layers do not sum their
    inputs' gradients. `scaled_gradients`: gradients of tp-replicated parameters are divided by tp.
    `lost_random_states`, `lost_optimizer_step`: not restored at load. Defects from the beginning, whatever `step`.
    `passenger_norm`: a layer norm inside the tied module. `decayed_norm`: the same, in the weight-decay group.
    `tied_norm`: the same, and tied too, though the output makes no gradient for it; refused before the start."""

    rank: NonNegativeInt | None = None
    """Global rank of a fault of one rank. Leave it out for defects of all ranks."""

    step: PositiveInt
    """Optimizer step at which the fault begins."""

    seconds: PositiveFloat = 1.0
    """Length of `slow`, seconds per step."""

    place: MemoryPlace | None = None
    """Where an `out_of_memory` occurs: a part of the step, an `evaluation`, a `save` or the `build` of the engine."""

    above: NonNegativeInt = 0
    """The largest micro-batch size with which `out_of_memory` does not occur."""

    call: PositiveInt = 1
    """The call in a step, counted from 1, in which `out_of_memory` occurs, such as the number of a micro-batch."""

    @model_validator(mode="after")
    def _rank_goes_with_kind(self) -> FaultSpec:
        if self.kind in FAULTS_OF_ONE_RANK and self.rank is None:
            raise ValueError(f"`{self.kind}` affects one rank: set `rank`")
        if self.kind not in FAULTS_OF_ONE_RANK and self.rank is not None:
            raise ValueError(f"`{self.kind}` affects all ranks: leave out `rank`")
        if (self.kind == "out_of_memory") != (self.place is not None):
            raise ValueError("`out_of_memory` needs a `place`, and no other kind has one")
        return self


FAULTS_OF_ONE_RANK = ("hang", "skip", "die", "slow", "flipped_byte", "out_of_memory")
