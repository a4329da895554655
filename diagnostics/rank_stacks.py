"""Has a process write its stacks when none of its Python threads can run, for rank_runner.py. Python 3.8 or newer.

`ring_hook.py` has registered a handler of faulthandler, which needs no Python. The signal goes to the thread that
writes the heartbeat, so no system call of the program is interrupted. It is sent only if that thread has not run for a
while and nothing has stopped the process: to write stacks while Python runs can crash it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

import safe_files
from ring_file import HEADER, MAGIC, VERSION

LOOK_S = 10.0
NUM_LOOKS = 4
"""Looks in a row that must find the same heartbeat, of one every ten seconds."""
LATE = 1.5
"""A look that comes so much later than it should means nothing: this program was stopped as well."""
# As in ring_hook.py.
HEARTBEAT_THREAD = "bsl-ring"
STACKS_SIGNAL = signal.SIGRTMAX - 5


def watch(folder: Path) -> None:
    """Look at the processes of a folder of rings for as long as it is there."""
    seen: dict[Path, Standstill] = {}
    while folder.is_dir():
        began = time.monotonic()
        time.sleep(LOOK_S)
        if time.monotonic() - began > LATE * LOOK_S:
            seen.clear()
        for path in folder.glob("*.ring"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                look(path, seen)


class Standstill:
    """How many looks in a row have found the same heartbeat, and whether the process was asked since it stands."""

    def __init__(self, heartbeat: float) -> None:
        self.heartbeat, self.count, self.is_asked = heartbeat, 0, False


def look(path: Path, seen: dict[Path, Standstill]) -> None:
    """Look at the process of a ring; if it stands still for long enough, it is asked for its stacks, once."""
    with safe_files.open_stream(path) as stream:
        data = stream.read(HEADER.size)
    if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC or HEADER.unpack(data)[1] != VERSION:
        return
    pid, ticks, heartbeat = (HEADER.unpack(data)[at] for at in (3, 4, 9))
    found = seen.get(path)
    if found is None or found.heartbeat != heartbeat:
        seen[path] = Standstill(heartbeat)
        return
    thread = waiting_thread(pid, ticks)
    found.count = found.count + 1 if thread else 0
    if thread and found.count >= NUM_LOOKS and not found.is_asked:
        found.is_asked = True
        # The process empties the file as soon as it runs: what is in it was asked for before looks came too late.
        if not path.with_suffix(".stacks").stat().st_size:
            send(pid, thread)


def waiting_thread(pid: int, ticks: int) -> int | None:
    """Return the number of the thread that writes the heartbeat, if it waits and has the handler; else None.

    One that is stopped, or that waits for a disk, has a reason of its own not to run, while others may.
    """
    if start_and_state(f"/proc/{pid}")[0] != ticks:
        return None
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text(errors="replace").strip() == HEARTBEAT_THREAD:
                return int(task.name) if start_and_state(str(task))[1] == "S" and catches(task) else None
    return None


def start_and_state(task: str) -> tuple[int, str]:
    """Return when a thread began, in clock ticks since boot, and the kernel's letter for its state."""
    with open(task + "/stat", encoding="utf-8", errors="replace") as stream:
        words = stream.read().rpartition(")")[2].split()
    return int(words[19]), words[0]


def catches(task: Path) -> bool:
    status = (task / "status").read_text(errors="replace")
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACKS_SIGNAL - 1) & 1)


def send(pid: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = {"x86_64": 234, "aarch64": 131, "ppc64le": 250}
    number = numbers.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, pid, thread, int(STACKS_SIGNAL))
