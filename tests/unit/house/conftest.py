"""The files of the package, parsed once."""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import bigsci_launch

PACKAGE = Path(bigsci_launch.__file__).parent
DIAGNOSTICS = PACKAGE.parent / "diagnostics"
Parsed = dict[str, ast.Module]
Program = Callable[[str], ModuleType]


@pytest.fixture(scope="session")
def modules() -> Parsed:
    """Every module of the package by its path below the package (`spy/judge/verdict.py`), parsed."""
    return {path.relative_to(PACKAGE).as_posix(): tree for path, tree in parsed()}


@cache
def parsed() -> list[tuple[Path, ast.Module]]:
    """Return every module of the package and its syntax tree, which nobody changes."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if "assets" not in path.relative_to(PACKAGE).parts)
    return [(path, ast.parse(path.read_text())) for path in paths]


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return what `ast.walk` yields, which takes long and which every law asks for."""
    return tuple(ast.walk(tree))


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every name that `tree` imports, at its top or inside a function: modules, and names from them."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@contextlib.contextmanager
def standalone() -> Iterator[Program]:
    """Stand-alone programs as modules: `program("rank_runner")`. They find their neighbours as when they run."""
    folders = [str(DIAGNOSTICS), str(DIAGNOSTICS / "lab")]
    known = set(sys.modules)
    sys.path[:0] = folders
    try:
        yield importlib.import_module
    finally:
        del sys.path[: len(folders)]
        for name in set(sys.modules) - known:
            if str(DIAGNOSTICS) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    """`program("rank_runner")`: a stand-alone program as a module."""
    with standalone() as load:
        yield load
