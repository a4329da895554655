"""What the card itself can do: `python -m on_gpu.ceilings` prints it as JSON.

Matrix products in bf16 and in tensorwise fp8 on random data, alone and in the shapes of a 1.3B model's layer, and a
copy in device memory. TFLOP/s and TB/s, each the median of several launches timed by events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from on_gpu.card import find_card

SHAPES = {"square": (8192, 8192, 8192), "1.3B up": (16384, 2048, 8192), "1.3B head": (16384, 2048, 50304)}
TINY_SHAPES = {"square": (256, 256, 256)}
REPEATS, WARM_UP = 12, 4


def main() -> None:
    card = find_card()
    shapes = TINY_SHAPES if card.is_tiny else SHAPES
    print(json.dumps([*_products(card.device, shapes), _copy(card.device, 1 << (20 if card.is_tiny else 31))]))


def _products(device: str, shapes: dict[str, tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    for name, (rows, inner, columns) in shapes.items():
        left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        right = torch.randn(columns, inner, device=device, dtype=torch.bfloat16)
        work = 2e-12 * rows * inner * columns
        yield {
            "ceiling": f"product {name}",
            "bf16_tflops": work / _seconds(device, lambda left=left, right=right: left @ right.t()),
            "fp8_tflops": work / _fp8_seconds(left, right) if device == "cuda" else None,
        }


def _fp8_seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    one = torch.ones((), device=left.device)
    a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    return _seconds("cuda", lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))


def _copy(device: str, num_bytes: int) -> dict[str, Any]:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"ceiling": "copy", "tb_per_s": 2e-12 * num_bytes / _seconds(device, lambda: target.copy_(source))}


def _seconds(device: str, launch: Callable[[], Any]) -> float:
    """Return the median seconds of a launch."""
    for _ in range(WARM_UP):
        launch()
    return median(_timed(device, launch) for _ in range(REPEATS))


def _timed(device: str, launch: Callable[[], Any]) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        launch()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    launch()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event) / 1e3


if __name__ == "__main__":
    main()
