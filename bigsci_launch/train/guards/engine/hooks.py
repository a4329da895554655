"""Looks at what the engine is about to do: hooks in its schedule, and before its functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine


def before_instruction(engine: PipelineEngine, instruction: type, look: Callable[[], None]) -> None:
    """Call `look` before the engine carries out an instruction of that type."""
    original = engine._INSTRUCTION_MAP[instruction]

    def run(engine: PipelineEngine, *args: Any, **kwargs: Any) -> None:
        look()
        original(engine, *args, **kwargs)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, instruction: run}


def before_call(owner: Any, name: str, look: Callable[[], None]) -> None:
    """Call `look` before each call of the function `name` of `owner`."""
    original = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        look()
        return original(*args, **kwargs)

    setattr(owner, name, run)
