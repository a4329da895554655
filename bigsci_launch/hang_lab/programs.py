"""Where the laboratory's stand-alone programs are."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def diagnostics_folder() -> Path:
    return Path(str(files("bigsci_launch"))) / "assets" / "diagnostics"


def lab_program(name: str) -> Path:
    """`diagnostics/lab/NAME.py`."""
    return (diagnostics_folder() / "lab" / f"{name}.py").resolve()


def rank_runner() -> Path:
    return (diagnostics_folder() / "rank_runner.py").resolve()
