"""The memory that `bsl plan` predicts, next to the peak of a rank on the card.

Each setting is one rank of `bsl train` that does two steps. Ranks run side by side as long as what they are expected
to show leaves a tenth of the card free: the peaks are those of each process. `need` is what the planner says is in use
at some moment, next to the peak of torch's tensors, and `shown` what it says nvidia-smi shows, next to the peak of
torch's pool: both without the rest of the process (its CUDA context, NCCL), which torch does not see.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.hardware import model_named
from bigsci_launch.plan.price.memory import StageMemory
from bigsci_launch.plan.price.price import price_stage_memory
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.topology import Topology
from on_gpu.card import Card
from on_gpu.record import Record, run_phase
from on_gpu.speed import LLAMA
from on_gpu.trained import Gpt, Trained, train_alone

STEPS = 2
LIMIT_S = 60.0
SIDE_BY_SIDE = 6
FREE_SHARE = 0.1
SPARE_GIB = 1.0
"""By how much a process may exceed what the planner says."""
AIM = 0.08
"""Largest relative error of the need that the project aims at."""

SMALL = Gpt("350M", 24, 1024, 16, 2048, 50257, micro_batch=4, micro_batches=2)
WIDE = Gpt("7B-wide", 4, 4096, 32, 2048, 32000, 2, 2, more={**LLAMA, "ffn_hidden_size": 11008})
WIDEST = Gpt(
    "70B-wide, one layer",
    *(1, 8192, 64, 4096, 32000, 1, 2),
    more={**LLAMA, "ffn_hidden_size": 28672, "num_key_value_heads": 8},
)
ON_CARD = (
    replace(WIDEST, name="70B-wide, two layers", layers=2),
    replace(WIDEST, name="70B-wide, two layers, recomputed", layers=2, micro_batch=2, recomputes=True),
    WIDEST,
    Gpt("1.3B", 24, 2048, 16, 2048, 50257, micro_batch=2, micro_batches=2),
    WIDE,
    replace(WIDE, name="7B-wide, recomputed", micro_batch=4, recomputes=True),
    replace(WIDE, name="7B-wide, alibi", more={**WIDE.more, "positions": "alibi"}),
    SMALL,
    replace(SMALL, name="350M, mbs 16", micro_batch=16),
    replace(SMALL, name="350M, mbs 16, recomputed", micro_batch=16, recomputes=True),
    replace(SMALL, name="350M, fp32", precision="fp32"),
    replace(SMALL, name="350M, fp16, swiglu", precision="fp16", more=LLAMA),
    replace(SMALL, name="350M, fp8", precision="fp8"),
    replace(SMALL, name="350M, dropout", more={"dropout": 0.1}),
)
TINY = (
    Gpt("tiny", 2, 64, 4, 64, 512, micro_batch=2, micro_batches=2),
    Gpt("tiny, recomputed", 2, 64, 4, 64, 512, micro_batch=2, micro_batches=2, recomputes=True),
)


class Room:
    """What is left of the card, so that ranks side by side do not take it from each other."""

    def __init__(self, gib: float) -> None:
        self._free, self._num_inside = gib, 0
        self._changed = threading.Condition()

    def enter(self, gib: float) -> None:
        """Wait until so much is free, or nothing is taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= gib or not self._num_inside)
            self._free -= gib
            self._num_inside += 1

    def leave(self, gib: float) -> None:
        with self._changed:
            self._free += gib
            self._num_inside -= 1
            self._changed.notify_all()


def run(record: Record, card: Card) -> None:
    """Train every setting, and compare."""
    settings = TINY if card.is_tiny else ON_CARD
    room = Room((card.memory_gib or 1.0) * (1 - FREE_SHARE))
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:

        def train(number: int) -> tuple[Gpt, StageMemory, Trained]:
            gpt = settings[number]
            predicted = predict(gpt, card)
            room.enter(predicted.predicted_gib + SPARE_GIB)
            try:
                trained = train_alone(gpt, card, Path(scratch) / str(number), STEPS, LIMIT_S)
            finally:
                room.leave(predicted.predicted_gib + SPARE_GIB)
            return gpt, predicted, trained

        for done in as_completed([pool.submit(train, number) for number in range(len(settings))]):
            errors += _note(record, card, *done.result())
    if errors:
        error = max(map(abs, errors))
        record.check(f"no error of the need is above {AIM:.0%}", error <= AIM, f"{error:.1%}")


def predict(gpt: Gpt, card: Card) -> StageMemory:
    """Return what the planner predicts without a calibration."""
    config = gpt.config(card, Path("tokens"), STEPS)
    setup = Setup.of_config(config, Topology(tp=1, pp=1, dp=1), 1)
    gpu = model_named(card.name, 1) if card.is_gpu else None
    calibration = replace(Calibration(), gpu=gpu) if gpu else Calibration()
    return price_stage_memory(setup, 0, calibration)


def _note(record: Record, card: Card, gpt: Gpt, predicted: StageMemory, trained: Trained) -> Sequence[float]:
    """Record a setting, and return the relative error of its need, if there was a peak."""
    need, shown = (gib - predicted.process_gib for gib in (predicted.need_gib, predicted.predicted_gib))
    error = need / trained.allocated_gib - 1 if trained.allocated_gib else None
    record.row(
        setting=gpt.name,
        micro_batch=gpt.micro_batch,
        precision=gpt.precision,
        recomputes=gpt.recomputes,
        state_gib=predicted.state_gib,
        need_gib=need,
        allocated_gib=trained.allocated_gib or None,
        error=error,
        shown_gib=shown,
        reserved_gib=trained.reserved_gib or None,
        shown_error=shown / trained.reserved_gib - 1 if trained.reserved_gib else None,
        retries=max((each.get("memory_retries", 0) for each in trained.steps), default=None),
        words=trained.words,
    )
    record.check(f"{gpt.name} trains", not trained.words, trained.words)
    if card.is_gpu and not trained.words:
        record.check(f"{gpt.name} reports its peak", trained.allocated_gib > 0)
    return [error] if error is not None else []


if __name__ == "__main__":
    run_phase(run)
