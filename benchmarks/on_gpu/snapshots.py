"""What the snapshots of `survive` cost on the card: a copy alone, and steps with and without one in turns."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from recovering.cases import Layout
from recovering.injured_run import BSL, steps_of, write_run_file
from recovery_cost import FIRST, intervals

from bigsci_launch.runs.layout import RunDir
from on_gpu.card import Card
from on_gpu.descendants import end_below
from on_gpu.trained import draw_tokens

LAYOUT = Layout(tp=1, pp=2, dp=1, precision="bf16", dropout=0.0)
"""Without data-parallel replicas nothing of the size of the state is sent but the copies."""
REPEATS = 3
BYTES_PER_ELEMENT = 12
"""fp32 masters, and AdamW's two moments."""


@dataclass(frozen=True, slots=True)
class SnapshotSize:
    """The bytes of the copy that is made alone; the model that is trained, on two ranks; pairs of steps."""

    alone_bytes: int
    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    micro_batch: int
    micro_batches: int
    pairs: int

    @property
    def state_bytes(self) -> int:
        """Those of one rank's copy."""
        elements = self.layers // 2 * 12 * self.hidden**2 + self.vocabulary * self.hidden
        return BYTES_PER_ELEMENT * elements


ON_CARD = SnapshotSize(5 << 29, 24, 1024, 16, 1024, 8192, 4, 4, pairs=4)
"""Two and a half GiB: no power of two, to which torch would round its own locked memory."""
TINY = SnapshotSize(3 << 21, 2, 64, 4, 32, 512, 2, 2, pairs=2)


def copy_alone(size: SnapshotSize, card: Card) -> dict[str, Any]:
    """Copy a state of that size out of the device and back into it, as snapshots and restored ranks do."""
    import torch

    from bigsci_launch.recover.holding import Shard
    from bigsci_launch.train.device.digest import digest64
    from bigsci_launch.train.survive.snapshot import Copy, HeldPart, Shape

    elements = size.alone_bytes // BYTES_PER_ELEMENT
    state = torch.rand(3, elements, device=card.device)
    before, began = available_bytes(), time.perf_counter()
    copy = Copy(Shape("document", (HeldPart(Shard("unit", 0, elements), elements),)))
    made_s, taken = time.perf_counter() - began, before - available_bytes()
    ((_, vectors),) = copy.part_vectors()
    pageable = torch.zeros_like(vectors, pin_memory=False)
    found = {
        "bytes": copy.shape.num_bytes,
        "made_s": made_s,
        "host_bytes_taken": taken,
        "is_locked": bool(copy.buffer.is_pinned()) if card.is_gpu else False,
        **rate("out", lambda: vectors.copy_(state, non_blocking=True), state.nbytes),
        **rate("back", lambda: state.copy_(vectors), state.nbytes),
        **rate("out_to_pageable", lambda: pageable.copy_(state), state.nbytes),
        **rate("digest", lambda: digest64(vectors[0]), vectors[0].nbytes),
    }
    return {**found, "is_equal": bool(torch.equal(state.cpu(), vectors))}


def rate(name: str, call: Callable[[], object], num_bytes: int) -> dict[str, float]:
    """Return the median milliseconds of a call, with the device's part of it, and GB/s."""
    import torch

    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return {f"{name}_ms": 1e3 * median(taken), f"{name}_gb_s": num_bytes / median(taken) / 1e9}


def available_bytes() -> int:
    """Return the host memory that programs can still get."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def train_in_turns(size: SnapshotSize, card: Card, folder: Path, limit_s: float) -> dict[str, Any]:
    """Train with a snapshot after every second step, and return what the steps took.

    Raises:
        RuntimeError: there were not enough steps in time, or the run has ended.
    """
    draw_tokens(folder / "tokens", size.vocabulary, 2 * size.length * size.micro_batch * size.micro_batches + 1)
    wanted = FIRST + 2 * size.pairs + 1
    run = RunDir(folder / "runs" / "snapshots")
    process = start(size, card, folder, wanted)
    until = time.monotonic() + limit_s
    try:
        moments: list[float] = []
        while len(moments) < wanted:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{len(moments)} of {wanted} steps; {last_words(run)}")
            time.sleep(0.1)
            attempt = run.latest_attempt()
            moments = [each["time"] for each in steps_of(attempt, LAYOUT)] if attempt else []
    finally:
        end_below(process.pid)
        process.wait(10)
    return turns(size, moments[:wanted])


def last_words(run: RunDir) -> str:
    """Return the end of each rank's log."""
    attempt = run.latest_attempt()
    logs = sorted(attempt.logs.iterdir()) if attempt and attempt.logs.is_dir() else []
    return " | ".join(f"{log.name}: {log.read_text(errors='replace').strip()[-700:]}" for log in logs) or "no log"


def start(size: SnapshotSize, card: Card, folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start the run. It would do more steps, so that none of those that are measured is saved."""
    model = {"num_layers": size.layers, "hidden_size": size.hidden, "num_attention_heads": size.heads}
    model |= {"vocab_size": size.vocabulary, "vocab_size_multiple": 4, "sequence_length": size.length}
    training = {"device": card.device, "share_devices": True, "steps": steps + 100}
    training |= {"micro_batch_size": size.micro_batch, "global_batch_size": size.micro_batch * size.micro_batches}
    more = {
        "model": model,
        "training": training,
        "data": {"prefix": str(folder / "tokens"), "held_out": 0.0},
        "checkpoint": {"save_interval": None},
        "monitor": {"watch": "off", "ring": "none", "eval_interval": None},
        "guards": {"interval": "off"},
    }
    survive = {"snapshot_steps": 2, "standby": False}
    path = write_run_file(folder, "snapshots", LAYOUT, folder / "tokens", survive, more)
    with (folder / "snapshots.out").open("wb") as out:
        command = [sys.executable, "-c", BSL, "submit", str(path), "--local"]
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def turns(size: SnapshotSize, moments: list[float]) -> dict[str, Any]:
    """Return the medians of steps without and with a snapshot before them, as `recovery_cost.py` pairs them."""
    each = intervals(moments, FIRST)
    plain, burdened = each[0::2], each[1::2]
    more = [after - before for before, after in zip(plain, burdened, strict=False)]
    return {
        "mb_per_rank": size.state_bytes / 1e6,
        "pairs": len(more),
        "step_ms": 1e3 * median(plain),
        "step_after_snapshot_ms": 1e3 * median(burdened),
        "more_ms": 1e3 * median(more),
        "more_ms_from_to": [1e3 * min(more), 1e3 * max(more)],
    }
