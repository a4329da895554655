"""Lets each `bsl train` that a program starts use `nccl_like`: import this as the interpreter starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

AFTER = "bigsci_launch.train.startup"


class TrainerFinder(MetaPathFinder):
    """Finds the module that chooses the device of a rank, and changes it once it is there."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path, target) if name == AFTER else None
        if found is not None and found.loader is not None:
            found.loader = TrainerLoader(found.loader)
        return found


class TrainerLoader(Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        import nccl_like

        nccl_like.use_in_trainer()


sys.meta_path.insert(0, TrainerFinder())
