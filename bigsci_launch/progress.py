"""How work reports its progress: the command line draws a bar, a test notes the calls, and others pass nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Report = Callable[[str], None]
"""Reports a line to the user."""


class Progress(Protocol):
    """Reports how many parts of the work are done, and what is being done now."""

    def __call__(self, num_done: int, text: str = "") -> None: ...


def no_progress(num_done: int, text: str = "") -> None:
    """Report nothing."""


Shown = Callable[[], AbstractContextManager[Progress]]
"""Shows the progress of one piece of work until the block ends."""


@contextmanager
def not_shown() -> Iterator[Progress]:
    yield no_progress
