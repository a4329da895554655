"""The card that a session measures, or the CPU on which the session itself is tested."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

TINY = "BSL_GPU_SESSION_TINY"
"""Set by `--tiny`: the sizes of a CPU, on whatever device there is."""


@dataclass(frozen=True, slots=True)
class Card:
    """What computes. `memory_gib` and `peak_tflops` (dense, bf16) are None on a CPU, and where they are not known."""

    device: str
    name: str
    memory_gib: float | None
    peak_tflops: float | None
    peak_fp8_tflops: float | None
    driver: str
    cuda: str
    torch: str
    python: str
    date: str
    is_tiny: bool

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def document(self) -> dict[str, Any]:
        """What each JSON file of a session says about the card."""
        return asdict(self)


def find_card() -> Card:
    """Return the first GPU that torch sees, or the CPU."""
    import torch

    found = torch.cuda.device_count() > 0
    known = None
    if found:
        from bigsci_launch.gpus import gpu_named

        known = gpu_named(torch.cuda.get_device_name(0))
    return Card(
        device="cuda" if found else "cpu",
        name=torch.cuda.get_device_name(0) if found else f"CPU ({os.cpu_count()} cores)",
        memory_gib=torch.cuda.get_device_properties(0).total_memory / 2**30 if found else None,
        peak_tflops=known.peak_tflops if known else None,
        peak_fp8_tflops=known.fp8_tflops if known else None,
        driver=_driver() if found else "none",
        cuda=torch.version.cuda or "none",
        torch=torch.__version__,
        python=platform.python_version(),
        date=datetime.now(timezone.utc).date().isoformat(),
        is_tiny=not found or bool(os.environ.get(TINY)),
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip().split("\n")[0] or "unknown"
