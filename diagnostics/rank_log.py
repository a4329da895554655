"""The log of a rank: every line with its time, and a limit of size. For rank_runner.py. Standard library only."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path

NEWEST_BYTES = 2**16
"""How much of the newest output a log keeps that has reached its limit."""
HEADING_BYTES = 128
KEEP_EVERY_S = 1.0


def complain(path: Path, error: OSError) -> None:
    say(f"rank_runner: cannot write {path}: {error}")


def say(text: str) -> None:
    """Write a line to stderr in one piece, so that the lines of several runners do not mix."""
    with contextlib.suppress(OSError):
        os.write(2, f"{' '.join(text.splitlines())}\n".encode())


class StampedLog:
    """Appends bytes to a file, with the time before each line. Partial lines are written at once: a hang may follow.

    A file that has reached `limit` bytes gets only the newest output from then on, in a region at its end that is
    written again and again. So the disk does not fill, and the last words are there whatever ends the runner.
    """

    def __init__(self, path: Path, limit: int = 0) -> None:
        self._at_line_start = True
        self._room = limit or sys.maxsize
        self._newest: Newest | None = None
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644)
            self._room = max(0, self._room - os.fstat(self._descriptor).st_size)
        except OSError as error:
            complain(path, error)

    def feed(self, chunk: bytes) -> None:
        stamp = time_stamp()
        pieces = []
        for line in split_lines(chunk):
            pieces.append(stamp + line if self._at_line_start else line)
            self._at_line_start = line.endswith(b"\n")
        with self._lock:
            self._write(b"".join(pieces))

    def end_line(self) -> None:
        if not self._at_line_start:
            self.feed(b"\n")
        self.keep_newest(now=True)

    def keep_newest(self, *, now: bool = False) -> float | None:
        """Write the newest output of a file that is full, not more often than once a second unless it must be `now`.

        Returns the seconds after which it is due; None if nothing waits.
        """
        with self._lock:
            return self._newest.keep(now=now) if self._newest else None

    def _write(self, data: bytes) -> None:
        # A full disk must not stop the program: what cannot be written is lost, but the pipe is still read.
        with contextlib.suppress(OSError):
            if self._descriptor is None:
                return
            if self._newest is None and len(data) > self._room:
                whole = data.rfind(b"\n", 0, self._room) + 1
                os.write(self._descriptor, data[:whole])
                data = data[whole:]
                self._newest = Newest(self._path, os.fstat(self._descriptor).st_size)
            if self._newest is not None:
                self._newest.add(data)
            else:
                self._room -= len(data)
                os.write(self._descriptor, data)


class Newest:
    """The newest output of a log that is full, at its end. The region grows to its size and then keeps it."""

    def __init__(self, path: Path, start: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR)  # without O_APPEND, which would ignore the offset
        is_at_line_start = start == 0 or os.pread(self._descriptor, 1, start - 1) == b"\n"
        text = f"rank_runner: the log has reached run.log_limit_mib: only its newest {NEWEST_BYTES >> 10} KiB follow"
        note = (b"" if is_at_line_start else b"\n") + time_stamp() + text.encode() + b"\n"
        os.pwrite(self._descriptor, note, start)
        self._start = start + len(note)
        self._bytes = bytearray()
        self._num_dropped = 0
        self._kept_at = -math.inf
        self._is_kept = True

    def add(self, data: bytes) -> None:
        self._bytes += data
        self._is_kept = False
        if len(self._bytes) > 2 * NEWEST_BYTES:
            self._drop()
        self.keep()

    def keep(self, *, now: bool = False) -> float | None:
        due_s = self._kept_at + KEEP_EVERY_S - time.monotonic()
        if self._is_kept:
            return None
        if due_s > 0 and not now:
            return due_s
        if len(self._bytes) > NEWEST_BYTES:
            self._drop()
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, self._heading() + self._bytes, self._start)
        self._kept_at, self._is_kept = time.monotonic(), True
        return None

    def _drop(self) -> None:
        """Drop the oldest lines. The first line that is left is whole, unless it is longer than everything kept."""
        first = len(self._bytes) - NEWEST_BYTES
        self._num_dropped += (at := self._bytes.find(b"\n", first) + 1 or first)
        del self._bytes[:at]

    def _heading(self) -> bytes:
        """Return a line with the number of dropped bytes. It fills the region, so that no older bytes follow."""
        if not self._num_dropped:
            return b""
        text = time_stamp() + f"rank_runner: {self._num_dropped} bytes are left out here".encode()
        return text.ljust(NEWEST_BYTES + HEADING_BYTES - len(self._bytes) - 1) + b"\n"


def time_stamp() -> bytes:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode()


def split_lines(chunk: bytes) -> list[bytes]:
    """Split `chunk` at newlines only: a carriage return belongs to its line (progress bars)."""
    lines = [line + b"\n" for line in chunk.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return [line for line in lines if line]
