"""What was appended to a file since it was last read: bounded in memory and in bytes, whatever is written there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.safe_files import open_stream

MOST_BYTES = 4 << 20
"""Of more new bytes than this, only the last are read: a gigabyte of progress bars is not worth reading."""
LONGEST_LINE = 1 << 16
"""Of a line that is longer, the end is kept."""
MARK_BYTES = 64
"""The last bytes that were read are looked at again: if they are others, the file is another one."""


@dataclass(frozen=True, slots=True)
class Growth:
    """New lines of a file, the oldest first. `grown`: whether there were new bytes, also without a complete line.

    `num_skipped` bytes before the lines were not read, because there were too many. `is_new_file`: it was rotated, or
    truncated. `trouble` is why it could not be read; None if it could.
    """

    lines: tuple[str, ...] = ()
    grown: bool = False
    num_skipped: int = 0
    is_new_file: bool = False
    trouble: str | None = None


class FileTail:
    """Reads what is appended to a file that others write, rotate or truncate. Progress bars end at a carriage return.

    At first, the last `history` bytes are read.
    """

    def __init__(self, path: Path, history: int = MOST_BYTES) -> None:
        self.path = path
        self._history = history
        self._state: tuple[int, int, int, int] | None = None
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._mark = b""
        self._torn = b""

    def read(self) -> Growth:
        """Return what is new. A file that cannot be read is said to be so, never to be silent."""
        try:
            found = self.path.stat()
            state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if state == self._state:
                return Growth()  # most logs of a large job: they are not even opened
            with open_stream(self.path, follow=True) as stream:
                growth = self._read(stream.fileno())
            self._state = state
            return growth
        except OSError as error:
            return Growth(trouble=f"{self.path}: {error.strerror or error}")

    def _read(self, handle: int) -> Growth:
        found = os.fstat(handle)
        is_first = self._file is None
        is_new_file = not is_first and not self._is_same(handle, found)
        if is_first or is_new_file:
            self._offset, self._mark, self._torn = 0, b"", b""
        self._file = (found.st_dev, found.st_ino)
        num_new = found.st_size - self._offset
        if num_new <= 0:
            return Growth(is_new_file=is_new_file)
        num_skipped = max(0, num_new - (self._history if is_first else MOST_BYTES))
        data = _read_at(handle, self._offset + num_skipped, num_new - num_skipped)
        self._offset += num_skipped + len(data)
        self._mark = (self._mark + data)[-MARK_BYTES:] if not num_skipped else data[-MARK_BYTES:]
        return Growth(self._lines(data, num_skipped > 0), bool(data), num_skipped, is_new_file)

    def _is_same(self, handle: int, found: os.stat_result) -> bool:
        if (found.st_dev, found.st_ino) != self._file:
            return False
        return _read_at(handle, self._offset - len(self._mark), len(self._mark)) == self._mark

    def _lines(self, data: bytes, was_cut: bool) -> tuple[str, ...]:
        if was_cut:
            self._torn = b""
        *lines, torn = (self._torn + data).replace(b"\r", b"\n").split(b"\n")
        self._torn = torn[-LONGEST_LINE:]
        if was_cut and lines:
            del lines[0]  # it is the end of a line that was not read
        return tuple(line[-LONGEST_LINE:].decode("utf-8", "replace") for line in lines if line)


def read_beginning(path: Path, num_bytes: int) -> tuple[str, ...]:
    """Return the complete lines in the first bytes of a file; none if it cannot be read."""
    try:
        with open_stream(path, follow=True) as stream:
            data = stream.read(num_bytes)
    except OSError:
        return ()
    return tuple(line.decode("utf-8", "replace") for line in data.replace(b"\r", b"\n").split(b"\n")[:-1])


def _read_at(handle: int, offset: int, num_bytes: int) -> bytes:
    """Return the bytes there; fewer if the file has become shorter."""
    parts: list[bytes] = []
    while num_bytes > 0 and (part := os.pread(handle, num_bytes, offset)):
        parts.append(part)
        offset, num_bytes = offset + len(part), num_bytes - len(part)
    return b"".join(parts)
