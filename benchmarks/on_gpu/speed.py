"""How fast `bsl train` trains on one card, as a share of its peak, next to what its matrix products reach alone.

One rank trains each case on random tokens, while the next one imports. MFU is what `plan/shape/tflops.py` calls so: no
recomputation, attention over the whole square. The first steps are left out, and the median of the others counts.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from on_gpu.card import Card
from on_gpu.record import Record, run_phase
from on_gpu.trained import Gpt, ReadyRank, Trained

WARM_UP, MEASURED = 2, 4
LIMIT_S = 70.0
BILLION = Gpt("1.3B", 24, 2048, 16, 2048, 50257, micro_batch=8, micro_batches=4)
LLAMA = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "biases": False, "tied_embeddings": False}
COMPILED = replace(BILLION, name="1.3B, compiled", compiles=True)
ON_CARD = (
    COMPILED,
    BILLION,
    replace(COMPILED, name="1.3B in fp8, compiled", precision="fp8"),
    replace(COMPILED, name="1.3B, largest, compiled", micro_batch=16, micro_batches=2),
    replace(COMPILED, name="1.3B, alibi, compiled", more={"positions": "alibi"}),
    Gpt("350M", 24, 1024, 16, 2048, 50257, micro_batch=16, micro_batches=4),
    Gpt(
        "four layers of 7B",
        *(4, 4096, 32, 4096, 32000),
        micro_batch=4,
        micro_batches=4,
        more={**LLAMA, "ffn_hidden_size": 11008},
    ),
    replace(BILLION, name="1.3B, recomputed", micro_batch=16, micro_batches=2, recomputes=True),
    replace(BILLION, name="1.3B, selective", micro_batch=16, micro_batches=2, recomputes="selective"),
    replace(BILLION, name="1.3B, largest", micro_batch=16, micro_batches=2),
    replace(BILLION, name="1.3B in fp8", precision="fp8"),
)
"""In the order of their worth: the phase may not reach all of them."""
TINY = (
    Gpt("tiny", 2, 64, 4, 64, 512, micro_batch=2, micro_batches=2),
    Gpt("tiny, compiled", 2, 64, 4, 64, 512, micro_batch=2, micro_batches=2, compiles=True),
    Gpt("tiny in fp8", 2, 64, 4, 64, 512, micro_batch=2, micro_batches=2, precision="fp8"),
)


def run(record: Record, card: Card) -> None:
    """Measure the ceilings, then each case."""
    cases = TINY if card.is_tiny else ON_CARD
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as started:

        def start(number: int) -> ReadyRank:
            rank = ReadyRank(cases[number], card, Path(scratch) / str(number), WARM_UP + MEASURED)
            started.callback(rank.end)
            return rank

        rank = start(0)
        for row in _ceilings(record):
            record.row(**row)
        for number in range(len(cases)):
            following = start(number + 1) if number + 1 < len(cases) else None
            _note(record, card, rank.gpt, rank.take_turn(LIMIT_S))
            rank = following or rank


def _ceilings(record: Record) -> list[dict[str, object]]:
    done = subprocess.run([sys.executable, "-m", "on_gpu.ceilings"], capture_output=True, text=True, timeout=60)
    record.check("ceilings were measured", done.returncode == 0, done.stderr[-300:])
    found: list[dict[str, object]] = json.loads(done.stdout) if done.returncode == 0 else []
    return found


def _note(record: Record, card: Card, gpt: Gpt, trained: Trained) -> None:
    steps = trained.steps[WARM_UP:]
    tokens = gpt.samples * gpt.length
    seconds = median(each["seconds"] for each in steps) if steps else None
    nearest = min(steps, key=lambda each: abs(each["seconds"] - seconds), default=None)
    record.row(
        case=gpt.name,
        micro_batch=gpt.micro_batch,
        micro_batches=gpt.micro_batches,
        recomputes=gpt.recomputes,
        precision=gpt.precision,
        compiles=gpt.compiles,
        seconds=seconds,
        tokens_per_s=round(tokens / seconds) if seconds else None,
        tflops=nearest["tflops"] if nearest else None,
        mfu=nearest["utilization"] if nearest and card.peak_tflops else None,
        allocated_gib=trained.allocated_gib,
        reserved_gib=trained.reserved_gib,
        start_s=round(trained.start_s, 1),
        words=trained.words,
    )
    # A size that does not fit is a row too.
    if "OutOfMemory" not in trained.words:
        sound = not trained.words and all(math.isfinite(each["loss"]) for each in trained.steps)
        record.check(f"{gpt.name} trains with finite losses", sound, trained.words)


if __name__ == "__main__":
    run_phase(run)
