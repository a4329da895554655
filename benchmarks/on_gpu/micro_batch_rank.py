"""One rank of the phase `micro_batches`: trains attempts in turn, on a card that others fill.

    python -m on_gpu.micro_batch_rank

Each line of stdin is an `Order`. Between two of them the engine and all groups of ranks are torn down: like
`several`, but the card has its memory back. Nothing is saved, because a checkpoint takes longer
than what is measured. After an attempt, rank 0 writes what it knows of it into `done.json` in the attempt's folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from on_gpu.ballast import Ballast

SQUEEZED = {"": (), "shortage": (3,), "thrash": (3, 4)}
"""The steps before which the card is made smaller."""
SHORTAGE_SHARE = 0.65
"""What a shortage leaves of the memory that a step needs: not enough for it, but enough for micro-batches of half."""
THRASH_SHARE, PARKED_SHARE = 1.2, 0.9
"""Thrashing leaves more than a step needs, but most of that is in torch's cache in pieces that the step cannot use."""
SMALL_BLOCK = 1 << 20
"""torch keeps blocks of up to 1 MiB apart, and serves no larger request with them."""
DONE = "done.json"


@dataclass(frozen=True, slots=True)
class Order:
    """An attempt to train, and what happens to the card in that time.

    Others leave `left_gib` of the card at its beginning; None asks for nothing. If `is_pretended`, there is no card, so
    thrashing is only said, and shortages are faults of the run file.
    """

    attempt: str
    port: int
    left_gib: float | None = None
    squeeze: Literal["", "shortage", "thrash"] = ""
    is_pretended: bool = False


@dataclass(slots=True)
class Squeeze:
    """Makes the card smaller before the steps that the order names."""

    order: Order
    ballast: Ballast | None
    peak: int = 0
    """Peak of torch's pool in the last step."""
    need: int = 0
    """What a step needs on top of what stays between steps."""
    seen: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        """Make the card as small as the attempt wants it at first."""
        if self.ballast and self.order.left_gib is not None:
            self.ballast.leave(int(self.order.left_gib * 2**30))

    def is_due(self, step: int) -> bool:
        return step in SQUEEZED[self.order.squeeze]

    def before_step(self, step: int) -> None:
        """Take memory away, if it is due. What torch keeps in its cache is not missed, so the cache goes first."""
        if not self.ballast or not self.is_due(step) or step in [each["step"] for each in self.seen]:
            return
        import torch

        torch.cuda.empty_cache()
        if not self.need:
            self.need = self.peak - torch.cuda.memory_reserved()
            share = SHORTAGE_SHARE if self.order.squeeze == "shortage" else THRASH_SHARE
            self.ballast.leave(int(share * self.need))
        if self.order.squeeze == "thrash":
            park(int(PARKED_SHARE * self.need))
        free = torch.cuda.mem_get_info()[0]
        self.seen.append({"step": step, "needs_gib": self.need / 2**30, "free_gib": free / 2**30})


def park(num_bytes: int) -> None:
    """Fill torch's cache with small blocks, as a program that has many small tensors for a while would."""
    import torch

    blocks = [torch.empty(SMALL_BLOCK, dtype=torch.uint8, device="cuda") for _ in range(num_bytes // SMALL_BLOCK)]
    del blocks


class Rank:
    """What stays in this process from one attempt to the next."""

    def __init__(self) -> None:
        self.squeeze = Squeeze(Order("", 0), None)
        self.engine: Any = None
        self._ballast: Ballast | None = None
        self._is_first = os.environ["RANK"] == "0"
        self._is_started = False

    def follow(self, order: Order) -> None:
        """Train the attempt of an order, and leave nothing of it on the card."""
        from bigsci_launch.runs.layout import write_json

        folder = Path(order.attempt)
        place = {"BSL_RUN_DIR": str(folder.parent.parent), "BSL_ATTEMPT": folder.name, "MASTER_PORT": str(order.port)}
        os.environ.update(place)
        self._start(order)
        self.squeeze = Squeeze(order, self._ballast)
        self.squeeze.begin()
        began = time.monotonic()
        words = self._train()
        if self._is_first:
            seconds = time.monotonic() - began
            write_json(folder / DONE, {"error": words, "seconds": seconds, "squeezes": self.squeeze.seen, **figures()})

    def _start(self, order: Order) -> None:
        from bigsci_launch.config.load import load_resolved
        from bigsci_launch.runs.layout import AttemptDir
        from bigsci_launch.train import startup

        if self._is_started:
            return
        self._is_started = True
        startup.start_torch(load_resolved(AttemptDir(Path(order.attempt)).config).training)
        if self._is_first and not order.is_pretended:
            self._ballast = Ballast()

    def _train(self) -> str:
        """Return the words of torch's error, if the attempt ended with one."""
        from several import train_one

        from bigsci_launch.train.rank.stop import drop_frames
        from bigsci_launch.train.survive.teardown import tear_down

        words = ""
        try:
            train_one()
        except RuntimeError as error:
            words = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            drop_frames(error)
        engine, self.engine = self.engine, None
        tear_down(engine)
        return words

    def end(self) -> None:
        """End what was started."""
        if self._ballast:
            self._ballast.end()


def figures() -> dict[str, Any]:
    """Return what torch still holds of the card, and how its allocator was set up; nothing on a CPU."""
    import torch

    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    found: dict[str, Any] = {"environment": {name: os.environ.get(name) for name in names}}
    if torch.cuda.is_initialized():
        settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
        found["allocator"] = {name: repr(value) for name, value in settings.items()}
        found["left_gib"] = torch.cuda.memory_allocated() / 2**30
    return found


def stand_in(rank: Rank) -> None:
    """Let the trainer pass by `rank`: where it builds the engine, before a step, around the search, after a step."""
    from bigsci_launch.train import loop
    from bigsci_launch.train.parallel import initial_weights
    from bigsci_launch.train.state import checkpoint
    from bigsci_launch.train.state.saves import Saves
    from bigsci_launch.train.steps import log

    build, memory_figures, train_batch = checkpoint.build_engine, log.memory_figures, loop._train_batch

    def built(*arguments: Any) -> Any:
        rank.engine = build(*arguments)
        return rank.engine

    def figured() -> dict[str, int]:
        found = memory_figures()
        rank.squeeze.peak = found.get("memory_reserved", 0)
        return found

    def squeezed(training: Any, progress: Any) -> float:
        rank.squeeze.before_step(progress.step + 1)
        return train_batch(training, progress)

    checkpoint.build_engine, log.memory_figures, loop._train_batch = built, figured, squeezed
    Saves.save = lambda *_, **__: None
    # torch's server waits for ever for its own end if it is ended as soon as it has begun, and nobody asks it here.
    loop.offered_recorder = contextlib.nullcontext
    # The same weights are drawn for each attempt.
    initial_weights.Draw._block = functools.cache(initial_weights.Draw._block)
    _stand_in_sizes(rank)


def _stand_in_sizes(rank: Rank) -> None:
    from bigsci_launch.train.microbatch.automatic import AutoSize

    prepare, has_thrashed = AutoSize.prepare, AutoSize.has_thrashed

    def prepared(size: Any, *arguments: Any) -> None:
        size._report.event("search", is_over=False)
        prepare(size, *arguments)
        size._report.event("search", is_over=True)

    def thrashed(size: Any) -> bool:
        order = rank.squeeze.order
        is_said = order.is_pretended and order.squeeze == "thrash" and rank.squeeze.is_due(size._report.step)
        return has_thrashed(size) or is_said

    AutoSize.prepare, AutoSize.has_thrashed = prepared, thrashed


def main() -> None:
    """Follow the orders on stdin. DS_ACCELERATOR is set: DeepSpeed is imported before the first one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from bigsci_launch.train import startup

    startup.start_deepspeed()
    rank = Rank()
    stand_in(rank)
    try:
        for line in sys.stdin:
            rank.follow(Order(**json.loads(line)))
    finally:
        rank.end()


if __name__ == "__main__":
    main()
    from bigsci_launch.train.rank.stop import end_finished

    end_finished()
