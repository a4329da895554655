"""Like `several`, but counts the bytes of all tensors that are alive, as torch's allocator of a GPU would see them.

Each step of a rank leaves a line in `live-RANK.jsonl` of the attempt: the most bytes that were alive at a moment before
the optimizer's step, which a GPU does in one kernel without anything of its own.
"""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import several
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Knows of each block of memory that an operation makes how large it is, and when it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, weakref.ref[Any]] = {}
        self._bytes, self._left, self.peak = 0, 0, 0

    def __torch_dispatch__(
        self, kernel: Any, types: Any, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        result = kernel(*arguments, **(named or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._note(each.untyped_storage())
        return result

    def _note(self, block: Any) -> None:
        address, size = block._cdata, block.nbytes()
        if address in self._blocks:
            return

        def forget(_: object) -> None:
            self._blocks.pop(address, None)
            self._bytes -= size

        self._blocks[address] = weakref.ref(block, forget)
        self._bytes += size
        self.peak = max(self.peak, self._bytes - self._left)

    def start_attempt(self) -> None:
        """Leave out what earlier attempts have left."""
        self._left = self._bytes

    def start_step(self) -> None:
        """Forget the peak so far."""
        self.peak = self._bytes - self._left


def count() -> None:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.pipe.engine import PipelineEngine

    live = Live()
    train_batch, step, train_one = PipelineEngine.train_batch, BF16_Optimizer.step, several.train_one

    @wraps(step)
    def uncounted(*arguments: Any, **named: Any) -> Any:
        peak = live.peak
        try:
            return step(*arguments, **named)
        finally:
            live.peak = peak

    @wraps(train_batch)
    def counted(*arguments: Any, **named: Any) -> Any:
        live.start_step()
        result = train_batch(*arguments, **named)
        path = Path(
            os.environ["BSL_RUN_DIR"], "attempts", os.environ["BSL_ATTEMPT"], f"live-{os.environ['RANK']}.jsonl"
        )
        with path.open("a") as lines:
            print(json.dumps({"bytes": live.peak}), file=lines)
        return result

    def train_alone() -> None:
        gc.collect()
        live.start_attempt()
        train_one()

    PipelineEngine.train_batch, BF16_Optimizer.step = counted, uncounted
    several.train_one = train_alone
    live.__enter__()


if __name__ == "__main__":
    several.main(count)
