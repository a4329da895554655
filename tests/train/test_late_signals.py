"""A rank that has finished ends with 0, whatever signal asks it to stop while it leaves its process group."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["SIGUSR2", pytest.param("SIGTERM", marks=pytest.mark.long)])
def test_a_request_to_stop_after_the_last_step_changes_nothing(start: Any, tmp_path: Path, name: str) -> None:
    attempt = start(tmp_path, "pp=2", training={"steps": 2, "precision": "bf16"})
    # The moment is short: a look that pauses for longer, as `attempt.until` does, misses it.
    while any(attempt.phase(rank) != "end" for rank in range(2)):
        assert any(process.poll() is None for process in attempt.processes), attempt.logs()
        time.sleep(0.002)
    num_sent = 0
    while any(process.poll() is None for process in attempt.processes):
        for process in attempt.processes:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                process.send_signal(getattr(signal, name))
        num_sent += 1
        time.sleep(0.001)
    assert {process.returncode for process in attempt.processes} == {0}, attempt.logs()
    assert num_sent > 2, "the ranks were gone before they were asked"
    assert {attempt.events(rank)[-1]["reason"] for rank in range(2)} == {"finished"}
