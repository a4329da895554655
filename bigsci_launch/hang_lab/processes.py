"""Watches and ends the processes of a reproduction: which are alive, and whether they are at rest."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from bigsci_launch.procfs import Process, read_processes

END_TIMEOUT_S = 15.0
POLL_S = 0.02


def read_switches(pid: int) -> int | None:
    """Return the number of context switches of the main thread of `pid`, or None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)


def members(sessions: Collection[int]) -> list[Process]:
    """Return the living processes of `sessions`; zombies are left to their parents."""
    return [one for one in read_processes().values() if one.session in sessions]


def kill_sessions(sessions: Collection[int]) -> None:
    """Send KILL to every member of `sessions`, until no new ones appear."""
    seen: set[int] = set()
    while new := [one.pid for one in members(sessions) if one.pid not in seen]:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        seen.update(new)


def wait_until_gone(sessions: Collection[int], timeout_s: float = END_TIMEOUT_S) -> list[int]:
    """Wait for the members of `sessions` to disappear; return those that are left after `timeout_s` seconds."""
    end = time.monotonic() + timeout_s
    while left := members(sessions):
        if time.monotonic() > end:
            break
        time.sleep(POLL_S)
    return [one.pid for one in left]


def rest_marks(pids: Iterable[int]) -> tuple[object, ...]:
    """Return a value that stays the same as long as no main thread of `pids` runs."""
    return tuple((pid, read_switches(pid)) for pid in pids)
