"""Finds content that is not imported: site files, templates, known hangs, stand-alone programs."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path


def packaged(*names: str) -> Path:
    """Return the path of a folder or file that comes with `bsl`: `packaged("slurm", "sites")`."""
    return Path(str(files("bigsci_launch")), "assets", *names)


def module_argv(python: str, module: str) -> list[str]:
    """Return the command that runs an installed module. `python -m` would look in the current directory first."""
    return [python, str(packaged("diagnostics", "run_module.py")), module]


def content_folders(name: str, own: Path, near: Path | None = None) -> list[Path]:
    """Return the folders called `name`, strongest first: in `near`, in each folder of `$BSL_PATH`, then `own`."""
    roots = [near] if near else []
    roots += [Path(part) for part in os.environ.get("BSL_PATH", "").split(os.pathsep) if part]
    return [*(root / name for root in roots), own]
