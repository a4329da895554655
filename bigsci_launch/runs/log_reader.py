"""Reads the log of one rank: forwards as it grows, or backwards from its end. Both give each line its time."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bigsci_launch.safe_files import open_stream

STAMPED = re.compile(r"(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})Z (?P<text>.*)", re.DOTALL)
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})Z ")
LONGEST_LINE = 2**20
"""A longer line is read in several pieces, so that a log without line breaks does not fill the memory."""
LONGEST_SHOWN = 2**16
"""Characters of a line that are shown. The rest is left out, and so are the pieces after one that was cut."""
BLOCK_BYTES = 2**16
MOST_SEARCHED = 2**26
"""Bytes at the end of a log in which the end of its last complete line is looked for."""
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
    """Reads one log incrementally, in complete lines; a missing file has none yet.

    `trouble` is why it cannot be read; None if it can.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._offset = 0
        self._last_stamp = ""
        self._is_cut = False
        self.trouble: str | None = None

    def new_lines(self) -> Iterator[LogLine]:
        """Yield every complete line that was not yielded before, oldest first."""
        stream = self._open()
        if stream is None:
            return
        with stream:
            self._skip_rest(stream)
            while raw := stream.readline(LONGEST_LINE):
                if not raw.endswith(b"\n") and len(raw) < LONGEST_LINE:
                    return  # the rest of this line has not been written yet
                self._offset += len(raw)
                stamp, text, is_cut = _parse(raw)
                self._is_cut = is_cut and not raw.endswith(b"\n")
                # A clock that is set back must not break the merge.
                self._last_stamp = max(self._last_stamp, stamp)
                yield LogLine(self._last_stamp, self._rank, text)
                self._skip_rest(stream)

    def _skip_rest(self, stream: BinaryIO) -> None:
        """Go to where the next line is read: after the rest of one that was cut."""
        stream.seek(self._offset)
        while self._is_cut and (raw := stream.readline(LONGEST_LINE)):
            self._is_cut = not raw.endswith(b"\n")
            self._offset = stream.tell() if not self._is_cut else _next_data(stream)
            stream.seek(self._offset)

    def _open(self) -> BinaryIO | None:
        self.trouble = None
        try:
            return open_stream(self._path, follow=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.trouble = f"{self._path}: not read: {error.strerror or error}"
            return None

    def last_lines(self) -> Iterator[LogLine]:
        """Yield the complete lines of the log, newest first. `new_lines` then yields only what is written later."""
        stream = self._open()
        if stream is None:
            return
        with stream:
            self._offset = _end_of_lines(stream)
            unstamped: list[str] = []
            next_stamp = ""
            for raw in _backwards(stream, self._offset):
                stamp, text, is_cut = _parse(raw)
                unstamped.append(text)
                if not (stamp or is_cut) and len(unstamped) < MOST_UNSTAMPED:
                    continue
                stamp = stamp or next_stamp
                next_stamp = min(next_stamp, stamp) if next_stamp else stamp
                self._last_stamp = max(self._last_stamp, stamp)
                yield from (LogLine(next_stamp, self._rank, each) for each in unstamped)
                unstamped = []
            yield from (LogLine("", self._rank, each) for each in unstamped)


def _parse(raw: bytes) -> tuple[str, str, bool]:
    """Return the time of a line, or an empty text; what is shown of it: the last state of a progress bar; and whether
    that was cut."""
    match = _STAMP.match(raw)
    text = (raw[match.end() :] if match else raw).decode("utf-8", "replace").rstrip("\r\n")
    text = text.rpartition("\r")[2] if "\r" in text else text
    is_cut = len(text) > LONGEST_SHOWN
    shown = f"{text[:LONGEST_SHOWN]} [cut: the line is longer]" if is_cut else text
    return (match[1].decode() if match else ""), shown, is_cut


def _next_data(stream: BinaryIO) -> int:
    """Return where a file has content again, from here on: a hole of gigabytes has no line break."""
    here = stream.tell()
    try:
        return stream.seek(here, os.SEEK_DATA)
    except OSError as error:
        return stream.seek(0, os.SEEK_END) if error.errno == errno.ENXIO else here  # none follows, or it is not known


def _end_of_lines(stream: BinaryIO) -> int:
    """Return where the last complete line ends; the end of the file, if the line after it is endless."""
    end = size = stream.seek(0, 2)
    while end > 0:
        if size - end >= MOST_SEARCHED:
            return size
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
