"""Where a defect acts: an engine, on some ranks, from a step on; and how a patch is taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

Act = Callable[["Place"], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a defect acts: an engine on a rank. `is_here` is whether this rank has it."""

    engine: Any
    is_here: bool
    at: int
    options: Mapping[str, Any]
    undo: ExitStack

    @property
    def step(self) -> int:
        """The optimizer step in progress, or that which comes next."""
        return int(self.engine.global_steps) + 1

    @property
    def is_on(self) -> bool:
        """Whether the defect acts now: from its step on, or in that step alone."""
        return self.is_here and (self.step == self.at if self.options.get("once") else self.step >= self.at)

    @property
    def adam(self) -> Any:
        return self.engine.optimizer.optimizer


def patch(undo: ExitStack, target: Any, name: str, value: Any) -> None:
    """Set an attribute, and set it back when `undo` closes."""
    undo.callback(setattr, target, name, getattr(target, name))
    setattr(target, name, value)
