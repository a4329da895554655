"""How work reports its progress: the command line draws a bar, a test notes the calls, and others pass nothing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Reports how many parts of the work are done, and what is being done now."""

    def __call__(self, num_done: int, text: str = "") -> None: ...


def no_progress(num_done: int, text: str = "") -> None:
    """Report nothing."""
