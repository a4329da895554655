"""The processes of a reproduction, as the four files of /proc show them that always answer, and how to end them all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

END_TIMEOUT_S = 15.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/PID/stat. `ticks` is its processor time, user and system, in clock ticks."""

    pid: int
    state: str
    session: int
    ticks: int


def read_process(pid: int) -> Process | None:
    """The process `pid`; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Process(pid, fields[0], int(fields[3]), int(fields[11]) + int(fields[12]))


def read_switches(pid: int) -> int | None:
    """How often the main thread of `pid` has left the processor; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)


def members(sessions: Collection[int]) -> list[Process]:
    """The living processes of `sessions`; zombies are their parents' business."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    processes = (read_process(pid) for pid in pids)
    return [one for one in processes if one and one.session in sessions and one.state != "Z"]


def kill_sessions(sessions: Collection[int]) -> None:
    """Send KILL to every member of `sessions`, until no new ones appear."""
    seen: set[int] = set()
    while new := [one.pid for one in members(sessions) if one.pid not in seen]:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        seen.update(new)


def wait_until_gone(sessions: Collection[int], timeout_s: float = END_TIMEOUT_S) -> list[int]:
    """Wait for the members of `sessions` to disappear; those that have not after `timeout_s` seconds."""
    end = time.monotonic() + timeout_s
    while left := members(sessions):
        if time.monotonic() > end:
            break
        time.sleep(POLL_S)
    return [one.pid for one in left]


def rest_marks(pids: Iterable[int]) -> tuple[object, ...]:
    """A value that stays the same as long as no main thread of `pids` runs."""
    return tuple((pid, read_switches(pid)) for pid in pids)
