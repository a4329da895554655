"""Lines and records as trainers write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from watching.noise import Values
from watching.simulation import Event

EPOCH = datetime(2022, 4, 28, 20, 28, 38, tzinfo=timezone.utc).timestamp()
SETS = 29
"""Data sets on which BLOOM was evaluated, in 12 minutes."""


def bloom(step: int, values: Values, size: int = 2048) -> str:
    """A step of bigscience's Megatron-DeepSpeed."""
    return (
        f"[default7]: iteration {step:8d}/  115311 | consumed samples: {step * size:12d} | "
        f"elapsed time per iteration (s): {values.seconds:.2f} | learning rate: 5.279E-05 | "
        f"global batch size: {size:5d} | lm loss: {values.loss:.6E} | grad norm: {values.grad_norm:.3f} | "
        "num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | TFLOPs: 149.02 |\n"
    )


def megatron_lm(step: int, values: Values, when: float, size: int = 256) -> str:
    """A step of Megatron-LM, with its time."""
    stamp = datetime.fromtimestamp(EPOCH + when, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    return (
        f" [{stamp}] iteration {step:8d}/   50000 | consumed samples: {step * size:12d} | "
        f"elapsed time per iteration (ms): {1000 * values.seconds:.1f} | learning rate: 1.5E-04 | "
        f"global batch size: {size:5d} | lm loss: {values.loss:.6E} | loss scale: 1.0 | "
        f"grad norm: {values.grad_norm:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def evaluated(step: int) -> str:
    """The result of one data set."""
    line = "-" * 91
    return f"[default7]:{line}\n[default7]:valid loss at iteration {step} | lm loss value: 2.327E+00 |\n{line}\n"


def pulse(when: float) -> str:
    """The line that BLOOM's watchdog added to the log every hour."""
    stamp = datetime.fromtimestamp(EPOCH + when, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    return f"[{stamp}] PULSE: tr11-176B-ml is running for 1-07:27:33 since 2022-04-29T20:28:38 (1528763)\n"


def pulses(first: float, last: float) -> Iterator[Event]:
    """One such line each hour."""
    when = first
    while when < last:
        yield Event(when, pulse(when))
        when += 3600.0


def arguments(eval_interval: int, save_interval: int) -> str:
    """What Megatron prints of them when it starts."""
    rows = ("bf16", True), ("eval_interval", eval_interval), ("save_interval", save_interval)
    return "".join(f"[default0]:  {name} {'.' * (48 - len(name))} {value}\n" for name, value in rows)


def record(kind: str, when: float, step: int | None, **fields: Any) -> str:
    """A record of a rank of `bsl train`, by its own clock."""
    return json.dumps({"kind": kind, "time": EPOCH + when, "mono": when, "step": step, **fields}) + "\n"
