"""Reading processes that may be stuck, for node_agent.py. Standard library only, Python 3.8 or newer.

Two ways, and no third: the four files of /proc that answer always (stat, status, wchan, comm), and forked children
that are killed when they take too long. What such a child had found until then is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Produce = Callable[[], Iterable[tuple[str, Any]]]

WAITING_ROOM_S = 0.7  # a reader older than this is stuck, not busy: it gives its slot to the next one


def read_text(path: str, limit: int = 1 << 16) -> str | None:
    """The first `limit` bytes of a file as text, or None."""
    try:
        with open(path, "rb") as stream:
            return stream.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def parse_stat(text: str) -> dict[str, Any]:
    """The fields of /proc/PID/stat that matter here; times in clock ticks."""
    head, _, tail = text.rpartition(")")
    field = tail.split()
    return {
        "comm": head.partition("(")[2],
        "state": field[0],
        "ppid": int(field[1]),
        "cpu_ticks": int(field[11]) + int(field[12]),
        "threads": int(field[17]),
        "start_ticks": int(field[19]),
    }


def parse_status(text: str) -> dict[str, Any]:
    """Context switches of the main thread, tracer, whether a core is being dumped, whether SIGKILL is pending."""
    field = dict(line.partition(":")[::2] for line in text.splitlines())
    pending = int(field.get("SigPnd", "0"), 16) | int(field.get("ShdPnd", "0"), 16)
    return {
        "voluntary": int(field.get("voluntary_ctxt_switches", 0)),
        "involuntary": int(field.get("nonvoluntary_ctxt_switches", 0)),
        "tracer_pid": int(field.get("TracerPid", 0)),
        "core_dumping": field.get("CoreDumping", "").strip() == "1",
        "kill_pending": bool(pending & 1 << (signal.SIGKILL - 1)),
    }


def read_safe(pid: int) -> dict[str, Any]:
    """What the four files say that never block, or `{"state": "gone"}`."""
    stat = read_text(f"/proc/{pid}/stat")
    status = read_text(f"/proc/{pid}/status")
    facts = {"mono": time.monotonic(), "state": "gone"}
    if stat and status:
        facts["wchan"] = read_text(f"/proc/{pid}/wchan")
        facts.update(parse_stat(stat))
        facts.update(parse_status(status))
    return facts


def parents() -> dict[int, int]:
    """Parent of every process that can be seen: {pid: ppid}."""
    stats = {name: read_text(f"/proc/{name}/stat") for name in os.listdir("/proc") if name.isdigit()}
    return {int(name): parse_stat(stat)["ppid"] for name, stat in stats.items() if stat}


def descendants(root: int, parent_of: dict[int, int]) -> set[int]:
    """Every process below `root`, without it."""
    children: dict[int, list[int]] = {}
    for pid, ppid in parent_of.items():
        children.setdefault(ppid, []).append(pid)
    below, left = set(), [root]
    while left:
        new = [pid for pid in children.get(left.pop(), ()) if pid not in below and pid != root]
        below.update(new)
        left.extend(new)
    return below


class Reader:
    """A forked child that reports (name, value) pairs of `produce()` and may block for ever."""

    def __init__(self, key: Any, produce: Produce, timeout_s: float) -> None:
        self.key, self.finished = key, False
        self.facts: dict[str, Any] = {}
        self.began = time.monotonic()
        self.deadline = self.began + timeout_s
        self._tail = b""
        self.descriptor, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _report(produce, write_end)
        os.close(write_end)
        with contextlib.suppress(OSError):  # the child has done it, or is gone
            os.setpgid(self.pid, self.pid)

    def receive(self) -> bool:
        """Take in what the child wrote; False at its end."""
        data = os.read(self.descriptor, 1 << 16)
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            name, value = json.loads(line)
            self.facts[name] = value
        return bool(data)

    def close(self, finished: bool) -> None:
        """Kill what is left of the child and its own children. Never waits: one that sleeps in the kernel stays."""
        self.finished = finished
        os.close(self.descriptor)
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(self.pid, os.WNOHANG)


def _report(produce: Produce, write_end: int) -> None:
    """Body of the child."""
    try:
        os.setpgid(0, 0)
        for item in produce():
            _write(write_end, item)
    except BaseException as error:
        _write(write_end, ("error", repr(error)[:300]))
    finally:
        os._exit(0)


def _write(descriptor: int, item: tuple[str, Any]) -> None:
    data = (json.dumps(item) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data) :]


def run_readers(starts: list[Callable[[], Reader | None]], workers: int, deadline: float) -> list[Reader]:
    """Calls `starts`, an ordered list of functions that give a Reader (or None: not yet), `workers` at a time.

    A reader that has become old is stuck rather than busy and holds no slot. Returns the readers that were started.
    """
    waiting = list(starts)
    running: list[Reader] = []
    done: list[Reader] = []
    while waiting or running:
        now = time.monotonic()
        busy = sum(now - reader.began < WAITING_ROOM_S for reader in running)
        while waiting and busy < workers and now < deadline:
            reader = waiting[0]()
            if reader is None:
                break
            del waiting[0]
            running.append(reader)
            busy += 1
        if not running and now >= deadline:
            break
        _serve(running, done, deadline)
    return done


def _serve(running: list[Reader], done: list[Reader], deadline: float) -> None:
    """Wait a moment for the running readers; moves those that ended, or ran out of time, to `done`."""
    ready = select.select([reader.descriptor for reader in running], [], [], 0.02)[0]
    now = time.monotonic()
    for reader in list(running):
        ended = reader.descriptor in ready and not reader.receive()
        if ended or now > min(reader.deadline, deadline):
            running.remove(reader)
            reader.close(ended)
            done.append(reader)


def ask_child(produce: Produce, timeout_s: float) -> tuple[dict[str, Any], bool]:
    """The facts of one reader, and whether it came to its end."""
    done = run_readers([lambda: Reader(None, produce, timeout_s)], 1, time.monotonic() + timeout_s)
    return (done[0].facts, done[0].finished) if done else ({}, False)
