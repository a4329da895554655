"""Reads how long threads have been asleep, for node_agent.py. Standard library only, Python 3.8 or newer.

The scheduler keeps when each thread last ran (`se.exec_start` in /proc/PID/task/TID/sched), on the clock of the CPU
where that was. Each CPU has a scheduler clock of its own: it leaves out the time that interrupts and a hypervisor took
from that CPU. So the reader visits each CPU once and compares its clock with the time.
"""

from __future__ import annotations

import os
import time

from node_processes import read_text
from node_sockets import read_socket_bytes

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]
    # CPU: its scheduler clock minus the monotonic clock, in seconds; None if this program may not run there.
    Clocks = dict[int, "float | None"]

MAX_THREADS = 256
VISITS_LIMIT_S = 0.3
CLOCK_ERROR_S = 2.0


def read_rank_motion(rank: Facts, _request: Facts, known: Facts) -> Iterator[tuple[str, Any]]:
    """Yield the bytes on connections if the sample has none yet, and how long the threads have been asleep."""
    if "socket_bytes" not in rank["samples"][-1]:
        try:
            found = read_socket_bytes(rank["pid"], known)
        except (OSError, ValueError):
            found = None  # not known
        if found is not None:
            yield "socket_bytes", found
    known.setdefault("until", time.monotonic() + VISITS_LIMIT_S)
    idle = thread_idle(rank, known.setdefault("clocks", {}), known["until"])
    if idle:
        yield "thread_idle_s", idle
    children = child_idle(rank, known["clocks"], known["until"])
    if children:
        yield "child_idle_s", children


def child_idle(rank: Facts, clocks: Clocks, until: float) -> dict[str, float]:
    """Return {process ID: seconds since its main thread last ran} of the children, as far as that is known."""
    allowed = os.sched_getaffinity(0)
    pids = [child["pid"] for child in rank["samples"][0].get("children", ())]
    try:
        found = {str(pid): idle_s(pid, str(pid), clocks, until) for pid in pids}
    finally:
        os.sched_setaffinity(0, allowed)
    return {pid: round(idle, 1) for pid, idle in found.items() if idle is not None}


def idle_s(pid: int, thread: str, clocks: Clocks, until: float) -> float | None:
    """Return the seconds since a thread last ran, or None if that is not known. May move this program to its CPU."""
    folder = f"/proc/{pid}/task/{thread}"
    cpu, ran = last_cpu(f"{folder}/stat"), exec_start(f"{folder}/sched")
    now = time.monotonic()
    if not ran or cpu is None:
        return None
    if cpu not in clocks:
        clocks[cpu] = visit(cpu) if time.monotonic() < until else None
    offset = clocks[cpu]
    return None if offset is None else max(0.0, now + offset - ran)


def thread_idle(rank: Facts, clocks: Clocks, until: float) -> dict[str, float]:
    """Return {thread ID: seconds since it last ran}, to 0.1 s; a thread is missing if that is not known.

    An answer that contradicts the samples is not an answer: a thread that ran after one of them is not older.
    """
    pid, allowed = rank["pid"], os.sched_getaffinity(0)
    found = {}
    try:
        for name in sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:MAX_THREADS]:
            idle = idle_s(pid, name, clocks, until)
            longest = longest_idle(name, rank["samples"], time.monotonic())
            if idle is not None and idle <= longest + CLOCK_ERROR_S:
                found[name] = round(idle, 1)
    except OSError:
        pass  # it has ended
    finally:
        os.sched_setaffinity(0, allowed)
    return found


def longest_idle(thread: str, samples: list[Facts], now: float) -> float:
    """Return the seconds since the latest sample after which `thread` has run; infinite if it did in none."""
    times = [sample.get("thread_times", {}).get(thread) for sample in samples]
    ran = [
        sample["mono"]
        for sample, old, new in zip(samples, times, times[1:])
        if old is not None and new is not None and old != new
    ]
    return now - max(ran) if ran else float("inf")


def visit(cpu: int) -> float | None:
    """Move to a CPU and return its scheduler clock minus the monotonic clock, in seconds; None if that fails."""
    try:
        os.sched_setaffinity(0, {cpu})
    except OSError:
        return None
    ours, now = exec_start("/proc/thread-self/sched"), time.monotonic()
    return ours - now if ours and last_cpu("/proc/thread-self/stat") == cpu else None


def last_cpu(path: str) -> int | None:
    """Return the CPU that a thread last ran on: field 39 of its `stat` file; None if it has ended."""
    field = (read_text(path) or "").rpartition(")")[2].split()
    return int(field[36]) if len(field) > 36 else None


def exec_start(path: str) -> float | None:
    """Return when a thread's run time was last updated, in seconds on the scheduler clock of its CPU."""
    _, _, value = (read_text(path) or "").partition("\nse.exec_start")
    words = value[:80].split()
    return float(words[1]) / 1000.0 if len(words) > 1 and words[0] == ":" else None
