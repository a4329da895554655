"""Reads the log of one rank: forwards as it grows, or backwards from its end. Both give each line its time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

STAMPED = re.compile(r"(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})Z (?P<text>.*)", re.DOTALL)
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})Z ")
LONGEST_LINE = 2**20
"""A longer line is cut into several, so that a log without line breaks does not fill the memory."""
BLOCK_BYTES = 2**16
MOST_UNSTAMPED = 1000
"""How many lines without a time wait for that of the line before them, where a log is read backwards."""


class LogLine(NamedTuple):
    """A line of a rank's log. `stamp` is the time in UTC, to the microsecond; as text it sorts by time.

    A tuple, because a merge of large logs compares millions of them.
    """

    stamp: str
    rank: int
    text: str


class LogReader:
    """Reads one log incrementally, in complete lines; a missing file has none yet."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._offset = 0
        self._last_stamp = ""

    def new_lines(self) -> Iterator[LogLine]:
        """Yield every complete line that was not yielded before, oldest first."""
        try:
            stream = self._path.open("rb")
        except OSError:
            return
        with stream:
            stream.seek(self._offset)
            while raw := stream.readline(LONGEST_LINE):
                if not raw.endswith(b"\n") and len(raw) < LONGEST_LINE:
                    return  # the rest of this line has not been written yet
                self._offset += len(raw)
                stamp, text = _parse(raw)
                # A clock that is set back must not break the merge.
                self._last_stamp = max(self._last_stamp, stamp)
                yield LogLine(self._last_stamp, self._rank, text)

    def last_lines(self) -> Iterator[LogLine]:
        """Yield the complete lines of the log, newest first. `new_lines` then yields only what is written later."""
        try:
            stream = self._path.open("rb")
        except OSError:
            return
        with stream:
            self._offset = _end_of_lines(stream)
            unstamped: list[str] = []
            next_stamp = ""
            for raw in _backwards(stream, self._offset):
                stamp, text = _parse(raw)
                unstamped.append(text)
                if not stamp and len(unstamped) < MOST_UNSTAMPED:
                    continue
                stamp = stamp or next_stamp
                next_stamp = min(next_stamp, stamp) if next_stamp else stamp
                self._last_stamp = max(self._last_stamp, stamp)
                yield from (LogLine(next_stamp, self._rank, each) for each in unstamped)
                unstamped = []
            yield from (LogLine("", self._rank, each) for each in unstamped)


def _parse(raw: bytes) -> tuple[str, str]:
    """Return the time of a line, or an empty text, and what is shown of it: the last state of a progress bar."""
    match = _STAMP.match(raw)
    text = (raw[match.end() :] if match else raw).decode("utf-8", "replace").rstrip("\r\n")
    return (match[1].decode() if match else ""), text.rpartition("\r")[2] if "\r" in text else text


def _end_of_lines(stream: BinaryIO) -> int:
    """Return where the last complete line ends."""
    end = stream.seek(0, 2)
    while end > 0:
        first = max(0, end - BLOCK_BYTES)
        stream.seek(first)
        found = stream.read(end - first).rfind(b"\n")
        if found >= 0:
            return first + found + 1
        end = first
    return 0


def _backwards(stream: BinaryIO, end: int) -> Iterator[bytes]:
    """Yield the lines before the offset `end`, where one ends, without their line breaks, the last first."""
    if end == 0:
        return
    end, rest = end - 1, b""
    while end > 0:
        first = max(0, end - BLOCK_BYTES)
        stream.seek(first)
        *lines, last = reversed((stream.read(end - first) + rest).split(b"\n"))
        yield from lines
        end, rest = first, last
        if len(rest) >= LONGEST_LINE:
            yield rest
            rest = b""
    yield rest
