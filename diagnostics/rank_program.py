"""A process of a slot: started, spoken to, watched and killed with all that it has started. For rank_slot.py."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import threading
import time

import safe_files
from rank_process import Output, start_program, watch_stacks
from rank_rings import Rings

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from typing import Any

    from rank_log import StampedLog

    Events = queue.SimpleQueue[Any]

PR_SET_CHILD_SUBREAPER = 36
KILL_ROUNDS = 50
KILL_PAUSE_S = 0.02
STEADY_S = 2.0
"""Two looks that are further apart show that this runner did not run either, such as in a job that was suspended."""


class Program:
    """One process. Its messages and its end come into `events` as (program, message), None for the end."""

    def __init__(
        self,
        argv: list[str],
        environment: dict[str, str],
        log: StampedLog,
        rings: Rings,
        events: Events,
        *,
        stop_signal: int,
        has_channel: bool,
    ) -> None:
        self._events = events
        self.rings, self.is_warm = rings, False
        self.status: int | None = None
        self.ended_at = 0.0
        self._channel: socket.socket | None = None
        theirs = None
        if has_channel:
            self._channel, theirs = socket.socketpair()
            environment = {**environment, "BSL_SLOT_FD": str(theirs.fileno())}
        try:
            keep = theirs.fileno() if theirs is not None else -1
            self._process = start_program(argv, environment, stop_signal, is_tied=True, keep=keep)
        except OSError:
            self.close()
            raise
        finally:
            if theirs is not None:
                theirs.close()
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self.output = Output(self._process.stdout, log)
        watch_stacks(rings)
        self._standstill = Standstill(self.pid)
        threading.Thread(target=self._wait, daemon=True).start()

    def signal(self, number: int) -> None:
        if self.status is None:
            self._process.send_signal(number)

    def catches(self, number: int) -> bool:
        """Whether it has a handler for a signal, which a program has only after a while."""
        with contextlib.suppress(OSError, ValueError, StopIteration), open(f"/proc/{self.pid}/status") as stream:
            caught = next(line.split()[1] for line in stream if line.startswith("SigCgt:"))
            return bool(int(caught, 16) >> (number - 1) & 1)
        return False

    def tell(self, message: dict[str, Any]) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Let the process read the end of its channel: there is nothing left to wait for."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)

    def has_stood_still(self, limit_s: float) -> bool:
        """Whether SIGSTOP has stopped it for so long; to be asked all the time."""
        return self.status is None and self._standstill.look(limit_s)

    def _wait(self) -> None:
        reader = threading.Thread(target=self._read, daemon=True)
        if self._channel is not None:
            reader.start()
        status = self._process.wait()
        self.ended_at = time.time()
        self.status = status
        if self._channel is not None:
            reader.join(1.0)  # what it said last comes before its end
        self._events.put((self, None))

    def _read(self) -> None:
        assert self._channel is not None
        with contextlib.suppress(OSError), self._channel.makefile("rb") as stream:
            for line in stream:
                with contextlib.suppress(ValueError):
                    message = safe_files.parse_json(line)
                    if isinstance(message, dict):
                        self._events.put((self, message))


class Standstill:
    """How long a process is stopped, as steady looks at it have seen."""

    def __init__(self, pid: int) -> None:
        self._stat = f"/proc/{pid}/stat"
        self._since: float | None = None
        self._looked = time.monotonic()

    def look(self, limit_s: float) -> bool:
        """Whether it has been stopped for so long without a pause. A debugger (state `t`) has not stopped it."""
        before, self._looked = self._looked, time.monotonic()
        if state_and_parent(self._stat)[0] != "T":
            self._since = None
        elif self._since is None or self._looked - before > min(STEADY_S, limit_s):
            self._since = self._looked
        return self._since is not None and self._looked - self._since >= limit_s


def state_and_parent(stat: str) -> tuple[str, int]:
    """Return the kernel's letter for the state of a process, and its parent; empty and 0 if it is gone."""
    try:
        with open(stat, encoding="utf-8", errors="replace") as stream:
            words = stream.read().rpartition(")")[2].split()
        return words[0], int(words[1])
    except (OSError, IndexError):
        return "", 0


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of all orphans below it: none of them escapes `kill_all_below`."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_all_below(grace_s: float) -> None:
    """TERM every process below this one, and KILL what is left after `grace_s` seconds."""
    for pid, _, _ in below(os.getpid(), set()):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(state not in "ZX" for _, _, state in below(os.getpid(), set())):
        time.sleep(KILL_PAUSE_S)
    kill_all_below([], [])


def kill_all_below(keep: list[int], waited: list[int]) -> None:
    """KILL every process below this one, but those of `keep` and what is below them.

    Again and again, because they may be starting others. Orphans are waited for here; `waited` are children that
    other code waits for.
    """
    for _ in range(KILL_ROUNDS):
        doomed = below(os.getpid(), set(keep))
        for pid, parent, state in doomed:
            if state not in "ZX":
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if parent == os.getpid() and pid not in waited:
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)
        if all(state in "ZX" for _, _, state in doomed):
            return
        time.sleep(KILL_PAUSE_S)


def below(top: int, keep: set[int]) -> list[tuple[int, int, str]]:
    """Return (pid, parent, state) of every process below `top`, without `keep` and what is below them."""
    children: dict[int, list[tuple[int, int, str]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in keep:
            state, parent = state_and_parent(f"/proc/{name}/stat")
            if state:
                children.setdefault(parent, []).append((int(name), parent, state))
    found, tops = [], [top]
    while tops:
        rows = children.get(tops.pop(), [])
        found += rows
        tops += [row[0] for row in rows]
    return found
