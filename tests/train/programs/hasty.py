"""A rank of `bsl train` that does not wait long before it tries a refused save again."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bigsci_launch.train import __main__, startup


def start_deepspeed() -> None:
    plain_start()
    from bigsci_launch.train.state import saves

    saves.PAUSES_S, saves.END_PAUSES_S = (0.3,), (0.3,)
    saves.STOP_S, saves.FINISH_S = 1.0, 60.0


plain_start = startup.start_deepspeed
startup.start_deepspeed = start_deepspeed

if __name__ == "__main__":
    __main__.main()
