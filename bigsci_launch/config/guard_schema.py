"""The sections of a run file about what may go wrong: guards against it, and faults made on purpose."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from bigsci_launch.config.section import Section


class GuardsSection(Section):
    """Checks of the trainer on itself: that copies which must be equal are, to the last bit, and that gradients are
    whole. All of them run before the first step, in the first two, and before a save."""

    action: Literal["stop", "warn"] = "stop"
    """What a violation does: `stop` all ranks with an error, before anything wrong is saved, or `warn` in the log."""

    interval: Literal["auto", "off"] | PositiveInt = "auto"
    """Steps between checks. `auto`: as many as keep their cost below 0.5 % of the time of training. `off`: none at
    all, not even at load and save."""

    preflight: Literal["stop", "warn"] = "stop"
    """What a layout that would hang or crash later does: `stop` refuses it before the first step."""


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
    ]
    """Of one rank: `hang`: sleep for ever before the step. `skip`: leave out one tensor-parallel all-reduce of the step
    (data-parallel where tp is 1). `die`: SIGKILL itself. `slow`: sleep `seconds` in every step from `step` on.
    `flipped_byte`: one bit of the rank's optimizer shard is wrong on disk in the checkpoint after `step`.
    Of all ranks, from `step` on: `unreduced_tied_gradients`: tied copies are not summed over stages.
    `unclipped_tied_copy`: the last stage's copy is not clipped (bf16). `unreduced_tp_gradients`: column-parallel
    layers do not sum their inputs' gradients. `scaled_gradients`: gradients of tp-replicated parameters are divided by
    tp. `lost_random_states`, `lost_optimizer_step`: not restored at load. From the beginning, whatever `step`:
    `passenger_norm`: a layer norm inside the tied module. `decayed_norm`: the same, in the weight-decay group.
    `tied_norm`: the same, and tied too, though the output makes no gradient for it: refused before the start."""

    rank: NonNegativeInt | None = None
    """Global rank that misbehaves; left out where all ranks do."""

    step: PositiveInt
    """Optimizer step at which it begins."""

    seconds: PositiveFloat = 1.0
    """Length of `slow`, seconds per step."""

    @model_validator(mode="after")
    def _rank_goes_with_kind(self) -> FaultSpec:
        if self.kind in FAULTS_OF_ONE_RANK and self.rank is None:
            raise ValueError(f"`{self.kind}` is of one rank: say which (rank)")
        if self.kind not in FAULTS_OF_ONE_RANK and self.rank is not None:
            raise ValueError(f"`{self.kind}` is of all ranks: leave out rank")
        return self


FAULTS_OF_ONE_RANK = ("hang", "skip", "die", "slow", "flipped_byte")
