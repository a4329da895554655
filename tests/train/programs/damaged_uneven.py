"""A rank of an uneven run with a defect in step 3, which DAMAGE names; DAMAGED is the rank, if it is not rank 2.

`factor`: all sums of gradients are halved. `sum`: rank 2 gets another sum than the other owners. `update`: a moment of
rank 2 changes in its step. `memory`: a master of rank 2 changes between two steps.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bigsci_launch.train import __main__, startup

STEP, RANK = 3, int(os.environ.get("DAMAGED", "2"))


def start_deepspeed() -> None:
    plain_start()
    from bigsci_launch.train.uneven import engine, guards

    damage, is_here = os.environ["DAMAGE"], int(os.environ["RANK"]) == RANK
    made, state, watch = engine.UnevenEngine, guards.StateWatch, guards.SumWatch
    if damage in ("factor", "sum"):
        plain_pass = watch._see_reduced

        def see_reduced(self: Any) -> None:
            if self._engine.global_steps + 1 == STEP and (is_here or damage == "factor"):
                for tensors in self._engine.optimizer.gradients().values():
                    for tensor in tensors:
                        tensor.mul_(0.5)
            plain_pass(self)

        watch._see_reduced = see_reduced
    elif is_here and damage == "update":
        plain_take = made.take_step

        def take_step(self: Any, reduced: Any) -> None:
            plain_take(self, reduced)
            if reduced.step == STEP:
                shard = next(shard for shard in self.optimizer.masters if shard.unit.startswith("1."))
                self.optimizer.state_of(shard).exp_avg[0] += 1

        made.take_step = take_step
    elif is_here:
        plain_before = state.before_step

        def before_step(self: Any, step: int, *, is_armed: bool) -> None:
            if step == STEP:
                next(iter(self._engine.optimizer.masters.values())).data[0] += 1
            plain_before(self, step, is_armed=is_armed)

        state.before_step = before_step


plain_start = startup.start_deepspeed
startup.start_deepspeed = start_deepspeed

if __name__ == "__main__":
    __main__.main()
