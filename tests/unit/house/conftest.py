"""The package as the laws see it: its files, parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import bigsci_launch

PACKAGE = Path(bigsci_launch.__file__).parent
Parsed = dict[str, ast.Module]


@pytest.fixture(scope="session")
def modules() -> Parsed:
    """Every module of the package by its path below the package (`spy/judge/verdict.py`), parsed."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if "assets" not in path.relative_to(PACKAGE).parts)
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}


def imports(tree: ast.AST) -> Iterator[str]:
    """Every name that `tree` imports, at its top or inside a function: modules, and what is taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
