"""Tests that need one GPU. Without one, each is skipped with the reason. `make gpu` runs them.

With BSL_GPU_TESTS_ON=cpu in the environment, those that need no property of a card run on the CPU instead, to find
mistakes in the tests themselves before a card is at hand; the others are skipped as before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..train.conftest import Attempt, dataset, finish, start, start_rank

__all__ = ["dataset", "finish", "start", "start_rank"]

DEVICE = os.environ.get("BSL_GPU_TESTS_ON", "cuda")
ON_GPU: dict[str, Any] = {"device": DEVICE, "share_devices": True}


def reason_to_skip() -> str | None:
    """Return why no test here can run, or None."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    if torch.cuda.device_count():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} was built without GPUs"
    driver = shutil.which("nvidia-smi")
    return "torch sees no GPU" + ("" if driver else ", and there is no nvidia-smi")


@pytest.fixture(autouse=True)
def one_gpu(request: pytest.FixtureRequest) -> None:
    """Skip the test if there is no GPU, unless it may run on a CPU and is asked to."""
    may_run_here = DEVICE == "cpu" and "train_on_gpu" in request.fixturenames
    if not may_run_here and (reason := reason_to_skip()):
        pytest.skip(f"needs a GPU: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the device, so that a report says what it was made on."""
    if reason_to_skip() is None:
        import torch

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        terminalreporter.write_line(f"GPUs: {', '.join(names)}; torch {torch.__version__}")


@pytest.fixture
def train_on_gpu(finish: Any) -> Callable[..., Attempt]:
    """`train_on_gpu(folder, "tp=2", training={...}, ...)` trains on ranks that share the GPU."""

    def train(folder: Path, topology: str = "tp=1", **sections: Any) -> Attempt:
        training = {**ON_GPU, **sections.pop("training", {})}
        if DEVICE == "cpu" and training.get("precision") == "fp16":
            pytest.skip("needs a GPU: a CPU has no fp16")
        attempt: Attempt = finish(folder, topology, training=training, **sections)
        return attempt

    return train
