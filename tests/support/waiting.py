"""Waiting for a state, and never for seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(
    look: Callable[[], Found], timeout_s: float = 60.0, *, evidence: Callable[[], object] = lambda: "it did not happen"
) -> Found:
    """Look until the answer is true, and return it; after `timeout_s` fail with the evidence."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.01
    while not (found := look()):
        assert time.monotonic() < deadline, evidence()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.25)
    return found
