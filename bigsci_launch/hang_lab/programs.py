"""Where the laboratory's stand-alone programs are."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

RANK_VARIABLES = {
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONUNBUFFERED": "1",
}
"""The environment of every rank of the laboratory. Some of it is read when torch is imported."""


def diagnostics_folder() -> Path:
    return Path(str(files("bigsci_launch"))) / "assets" / "diagnostics"


def lab_program(name: str) -> Path:
    """`diagnostics/lab/NAME.py`."""
    return (diagnostics_folder() / "lab" / f"{name}.py").resolve()


def rank_runner() -> Path:
    return (diagnostics_folder() / "rank_runner.py").resolve()
