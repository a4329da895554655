"""A rank of an uneven run whose speed is measured over 3 steps. Rank 2 computes each micro batch SLOW_S slower."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bigsci_launch.train import __main__, startup


def start_deepspeed() -> None:
    plain_start()
    from bigsci_launch.train.uneven import speed
    from bigsci_launch.train.uneven.stage import UnevenStage

    speed.WINDOW = 3
    if os.environ["RANK"] == "2":
        plain_forward = UnevenStage.forward

        def forward(self: Any, x: Any) -> Any:
            time.sleep(float(os.environ["SLOW_S"]))
            return plain_forward(self, x)

        UnevenStage.forward = forward  # type: ignore[method-assign]


plain_start = startup.start_deepspeed
startup.start_deepspeed = start_deepspeed

if __name__ == "__main__":
    __main__.main()
