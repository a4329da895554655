"""`bsl train` as a rank of `slow_runs.py`, with places where it can be slow: `python -m slowing.trained ATTEMPT`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import several
from disturb import Disturber, before

LAYER_S = 0.004
"""What a layer waits for, as for a device: so much of it can be moved to another stage."""


def disturb() -> None:
    """Put the disturber into layers and the loader."""
    from bigsci_launch.train.parallel.model import TransformerLayer
    from bigsci_launch.train.samples.batches import Batches
    from bigsci_launch.train.steps.garbage import Garbage

    disturber = Disturber(int(os.environ["RANK"]))
    original = TransformerLayer.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        disturber.at("forward")
        time.sleep(LAYER_S + disturber.moved(LAYER_S))
        out = original(*arguments, **named)
        if out.requires_grad:
            out.register_hook(lambda _: disturber.at("backward"))
        return out

    TransformerLayer.forward = forward  # type: ignore[method-assign]
    before(Batches, "_micro_batch", lambda: disturber.at("loader"))
    before(Garbage, "after_step", lambda: disturber.collect(5))


if __name__ == "__main__":
    several.main(disturb)
