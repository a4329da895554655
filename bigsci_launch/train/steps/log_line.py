"""One console line per step, in the format of bigscience's Megatron-DeepSpeed, so that existing parsers can read it.

That format gives seconds per iteration; Megatron-LM and deepspeedai's Megatron-DeepSpeed give milliseconds. The line
has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bigsci_launch.iteration_line import BATCH_SIZE, LOSS, MILLISECONDS, SECONDS


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. `seconds` is wall time, `tflops` the TFLOP/s of one rank with recomputation, `utilization`
    the share of the peak (0 to 1) without it; `loss_scale` is None unless fp16 scales the loss, `planned_s` unless the
    step was planned. `memory` holds the rank's figures as its GPU has them, none on a CPU."""

    step: int
    num_steps: int
    consumed_samples: int
    sequence_length: int
    learning_rate: float
    global_batch_size: int
    micro_batch_size: int
    loss: float
    grad_norm: float
    num_skipped: int
    num_nan: int
    seconds: float
    tflops: float
    utilization: float | None
    loss_scale: float | None = None
    planned_s: float | None = None
    memory: Mapping[str, int] = field(default_factory=dict)


def format_step(result: StepResult) -> str:
    """Return the line, without a newline."""
    fields = [
        f"iteration {result.step:8d}/{result.num_steps:8d}",
        f"consumed samples: {result.consumed_samples:12d}",
        f"consumed tokens: {result.consumed_samples * result.sequence_length:12d}",
        f"{SECONDS}: {result.seconds:.2f}",
        f"{MILLISECONDS}: {1e3 * result.seconds:.1f}",
        f"learning rate: {result.learning_rate:.3E}",
        f"{BATCH_SIZE}: {result.global_batch_size:5d}",
        f"{LOSS}: {result.loss:.6E}",
        *([] if result.loss_scale is None else [f"loss scale: {result.loss_scale:.1f}"]),
        f"grad norm: {result.grad_norm:.3f}",
        f"number of skipped iterations: {result.num_skipped:3d}",
        f"number of nan iterations: {result.num_nan:3d}",
        f"samples per second: {result.global_batch_size / result.seconds:.3f}",
        f"TFLOPs: {result.tflops:.2f}",
    ]
    if result.utilization is not None:
        fields.append(f"utilization: {100 * result.utilization:.1f} %")
    if "memory_allocated" in result.memory:
        peak, pool = (result.memory[key] / 2**30 for key in ("memory_allocated", "memory_reserved"))
        fields.append(f"memory: {peak:.2f} of {pool:.2f} GiB reserved")
    return f" {' | '.join(fields)} |"


def step_record(result: StepResult) -> dict[str, Any]:
    """Return the fields of a `step` event; `loss_hex` holds the exact loss."""
    fields = asdict(result)
    for name in ("step", "num_steps", "sequence_length", "num_nan", "memory"):
        del fields[name]
    return {"loss_hex": result.loss.hex(), **fields, **result.memory}
