"""Hatchling's hook for a wheel with the C part of the call trace: compiled if BSL_NATIVE=1, else the wheel is pure.

The compiled module is next to its source, with the name that `diagnostics/calls_build.py` looks for.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = Path("bigsci_launch", "assets", "diagnostics")


class NativeWheel(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("BSL_NATIVE") != "1" or version == "editable":
            return
        name, data = compiled(Path(self.root, PLACE))
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name, name)
        file.write_bytes(data)
        build_data["force_include"][str(file)] = str(PLACE / name)
        build_data["pure_python"] = False
        build_data["tag"] = f"{interpreter_tag()}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compiled(folder: Path) -> tuple[str, bytes]:
    """Return the name and the content of the module that a rank would compile for itself."""
    spec = importlib.util.spec_from_file_location("calls_build", folder / "calls_build.py")
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, build._file_name())
        build._compile(str(file))
        return file.name, file.read_bytes()


def interpreter_tag() -> str:
    digits = sysconfig.get_config_var("py_version_nodot")
    return f"cp{digits}-cp{digits}"
