"""Which pairs of checkpoints are compared as ZeRO's: one is DeepSpeed's, and the other has tensors with names."""

from __future__ import annotations

from bigsci_launch.weights.files.sources import Weights, WeightsLayout

DEEPSPEED: tuple[WeightsLayout, ...] = ("deepspeed", "universal")


def is_of_zero(a: Weights, b: Weights) -> bool:
    """Whether one side is a checkpoint of DeepSpeed, and the other is one that is cut otherwise, or plain files.

    Between checkpoints that are cut alike, every entry has its counterpart, also what says how they are cut.
    """
    layouts = (a.layout, b.layout)
    is_known = any(layout in DEEPSPEED for layout in layouts) and all(
        layout in (*DEEPSPEED, "files") for layout in layouts
    )
    return is_known and not _are_cut_alike(a, b)


def _are_cut_alike(a: Weights, b: Weights) -> bool:
    labels_a, labels_b = ({source.label for source in side.sources} for side in (a, b))
    is_alike = a.layout == b.layout and a.topology == b.topology and labels_a == labels_b
    return is_alike and a.metadata.zero.stage == b.metadata.zero.stage
