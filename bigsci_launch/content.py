"""Finds content that is not imported: site files, templates, known hangs, stand-alone programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any


def packaged(*names: str) -> Path:
    """Return the path of a folder or file that comes with `bsl`: `packaged("slurm", "sites")`."""
    return Path(str(files("bigsci_launch")), "assets", *names)


def module_argv(python: str, module: str) -> list[str]:
    """Return the command that runs an installed module. `python -m` would look in the current directory first."""
    return [python, str(packaged("diagnostics", "run_module.py")), module]


def content_folders(name: str, own: Path, near: Path | None = None) -> list[Path]:
    """Return the folders called `name`, strongest first: in `near`, in each folder of `$BSL_PATH`, then `own`."""
    roots = [near] if near else []
    roots += [Path(part) for part in search_path().split(os.pathsep) if part]
    return [*(root / name for root in roots), own]


def search_path() -> str:
    """Return `$BSL_PATH`: the folders of users, whose files come before ours."""
    return os.environ.get("BSL_PATH", "")


PLACE = ("assets", "diagnostics")


def knowledge_files(folder: str, suffix: str) -> Iterator[Any]:
    """Yield the files of `folder` in `diagnostics/`, those of users first: paths, or files in the archive of a job."""
    here: Any = files("bigsci_launch")
    packed = here.joinpath(*PLACE, folder)
    own = content_folders(folder, packed)[:-1] if isinstance(packed, Path) else []
    for each in (*own, packed):
        found = each.iterdir() if each.is_dir() else ()
        yield from sorted((file for file in found if file.name.endswith(suffix)), key=lambda file: str(file.name))
