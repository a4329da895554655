"""One console line per step, in the format of bigscience's Megatron-DeepSpeed: existing parsers read it.

That one gives seconds per iteration, Megatron-LM and deepspeedai's Megatron-DeepSpeed milliseconds: both are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave. `seconds` is its wall time, `tflops` TFLOP/s of one rank, `utilization` of its peak, 0 to 1;
    `loss_scale` where fp16 has one."""

    step: int
    num_steps: int
    consumed_samples: int
    sequence_length: int
    learning_rate: float
    global_batch_size: int
    loss: float
    grad_norm: float
    num_skipped: int
    num_nan: int
    seconds: float
    tflops: float
    utilization: float | None
    loss_scale: float | None = None


def format_step(result: StepResult) -> str:
    """The line, without a line end."""
    fields = [
        f"iteration {result.step:8d}/{result.num_steps:8d}",
        f"consumed samples: {result.consumed_samples:12d}",
        f"consumed tokens: {result.consumed_samples * result.sequence_length:12d}",
        f"elapsed time per iteration (s): {result.seconds:.2f}",
        f"elapsed time per iteration (ms): {1e3 * result.seconds:.1f}",
        f"learning rate: {result.learning_rate:.3E}",
        f"global batch size: {result.global_batch_size:5d}",
        f"lm loss: {result.loss:.6E}",
        *([] if result.loss_scale is None else [f"loss scale: {result.loss_scale:.1f}"]),
        f"grad norm: {result.grad_norm:.3f}",
        f"number of skipped iterations: {result.num_skipped:3d}",
        f"number of nan iterations: {result.num_nan:3d}",
        f"samples per second: {result.global_batch_size / result.seconds:.3f}",
        f"TFLOPs: {result.tflops:.2f}",
    ]
    if result.utilization is not None:
        fields.append(f"utilization: {100 * result.utilization:.1f} %")
    return f" {' | '.join(fields)} |"


def step_record(result: StepResult) -> dict[str, Any]:
    """The fields of a `step` event; `loss_hex` holds the loss to the last bit."""
    return {
        "loss": result.loss,
        "loss_hex": result.loss.hex(),
        "learning_rate": result.learning_rate,
        "global_batch_size": result.global_batch_size,
        "consumed_samples": result.consumed_samples,
        "grad_norm": result.grad_norm,
        "seconds": result.seconds,
        "tflops": result.tflops,
        "utilization": result.utilization,
        "num_skipped": result.num_skipped,
        "loss_scale": result.loss_scale,
    }
