"""The program of the job script: it starts with the standard library alone, under a Python without site-packages."""

from __future__ import annotations

import ast
import sys

from bigsci_launch.launch.job.frozen import ENTRY, modules_of
from bigsci_launch.launch.job.program import COMMANDS

from .conftest import imports


def test_it_needs_the_standard_library_only() -> None:
    sources = modules_of(ENTRY)
    assert len(sources) > len(COMMANDS), "the modules are not found"
    found = {
        f"{path}: {name}"
        for path, source in sources.items()
        for name in imports(ast.parse(source))
        if name.split(".")[0] not in {*sys.stdlib_module_names, "bigsci_launch"}
    }
    assert not found, f"what a job script starts has no site-packages: {sorted(found)}"
