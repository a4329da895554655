"""A rank of `bsl train` that writes which kernels one of its steps has run, and ends. Phase `kernels` starts it.

    python -m on_gpu.programs.profiled_rank FILE.json

On a CPU, the operations stand for the kernels.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from on_gpu.programs import ready_rank

PROFILED = 4
"""The step, by when everything is compiled and allocated."""


def profiled(train_batch: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """Return `train_batch`, whose `PROFILED`th call is looked at and ends the process."""
    num_calls = 0

    def run(*arguments: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls < PROFILED:
            return train_batch(*arguments, **named)
        file.write_text(json.dumps(profile_of(lambda: train_batch(*arguments, **named))))
        os._exit(0)

    return run


def profile_of(work: Callable[[], Any]) -> dict[str, Any]:
    """Return {wall_ms, kernels: {name: [count, ms]}} of some work. Profiling makes it slower, and not the kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        began = time.monotonic()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        wall_s = time.monotonic() - began
    kernels: dict[str, list[float]] = {}
    for event in seen.events():
        if on_gpu or event.cpu_parent is None or event.key.startswith("aten::"):
            entry = kernels.setdefault(event.key, [0, 0.0])
            entry[0] += 1
            entry[1] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3
    return {"wall_ms": 1e3 * wall_s, "kernels": kernels}


def main() -> None:
    file, start = Path(sys.argv[1]), ready_rank.__main__.main

    def begin() -> None:
        from deepspeed.runtime.pipe.engine import PipelineEngine

        PipelineEngine.train_batch = profiled(PipelineEngine.train_batch, file)
        start()

    ready_rank.__main__.main = begin
    ready_rank.main()


if __name__ == "__main__":
    main()
