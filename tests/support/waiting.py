"""Waiting for a state, and never for seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(
    look: Callable[[], Found], timeout_s: float = 300.0, *, evidence: Callable[[], object] = lambda: "it did not happen"
) -> Found:
    """Look until the answer is true, and return it; after `timeout_s` fail with the evidence.

    Pauses at least as long as a look takes: one that starts programs leaves the cores to what it waits for.
    """
    deadline = time.monotonic() + timeout_s
    pause_s, began = 0.01, time.monotonic()
    while not (found := look()):
        ended = time.monotonic()
        assert ended < deadline, evidence()
        time.sleep(max(pause_s, min(ended - began, 2.0)))
        pause_s, began = min(1.5 * pause_s, 0.25), time.monotonic()
    return found
