"""Finds the stand-alone programs of the hang lab."""

from __future__ import annotations

from pathlib import Path

from bigsci_launch.content import packaged

RANK_VARIABLES = {
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONUNBUFFERED": "1",
}
"""The environment of every rank of the hang lab. Some of it is read when torch is imported."""


def lab_program(name: str) -> Path:
    return packaged("diagnostics", "lab", f"{name}.py").resolve()


def rank_runner() -> Path:
    return packaged("diagnostics", "rank_runner.py").resolve()
