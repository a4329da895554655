"""Which pairs of checkpoints are compared as ZeRO's: one is DeepSpeed's, and the other has tensors with names."""

from __future__ import annotations

from bigsci_launch.weights.files.sources import Weights, WeightsLayout

DEEPSPEED: tuple[WeightsLayout, ...] = ("deepspeed", "universal")


def is_of_zero(a: Weights, b: Weights) -> bool:
    """Whether one side is a checkpoint of DeepSpeed, and the other is one too or is made of plain files."""
    layouts = (a.layout, b.layout)
    return any(layout in DEEPSPEED for layout in layouts) and all(layout in (*DEEPSPEED, "files") for layout in layouts)
