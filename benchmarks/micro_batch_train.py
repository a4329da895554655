"""One rank of `bsl train` that agrees about its memory in every other step only: `micro_batch_cost.py` starts it."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from collections.abc import Callable
from typing import Any

from bigsci_launch.train import startup


def start_deepspeed() -> None:
    plain_start()
    from bigsci_launch.train.microbatch import traffic
    from bigsci_launch.train.microbatch.automatic import AutoSize

    agree_in = AutoSize.around_step

    def train(self: Any, step: int, work: Callable[[], Any]) -> Any:
        if step % 2:
            return agree_in(self, step, work)
        engine, agreement = self._engine, self._agreement
        guarded, watched = engine._INSTRUCTION_MAP, traffic._present
        engine._INSTRUCTION_MAP, traffic._present = agreement.instructions, None
        engine._exec_schedule = agreement._exec_schedule
        try:
            return work()
        finally:
            engine._INSTRUCTION_MAP, traffic._present = guarded, watched
            engine._exec_schedule = agreement._exec

    AutoSize.around_step = train  # type: ignore[method-assign]


plain_start = startup.start_deepspeed
startup.start_deepspeed = start_deepspeed

if __name__ == "__main__":
    from bigsci_launch.train.__main__ import main

    main()
