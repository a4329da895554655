"""Compares segments of mapped files with C's `memcmp`, without a copy and without numpy."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from bigsci_launch.weights.files.mapped import MappedFile
from bigsci_launch.weights.files.tensors import Segment

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcmp.restype = ctypes.c_int

# Files that a limited pool keeps open. Two pools at a time then use half of the usual limit of 1024 open files.
MANY_FILES = 256


@dataclass
class _Held:
    """An open file, and how many threads use it by its address."""

    file: MappedFile
    num_users: int = 0


class FilePool:
    """Mapped files, opened on first use. Threads may share a pool.

    Without a `limit`, files stay open until they are closed. With a limit (2 or more), the least recently used file is
    closed, unless a thread is `using` it (numpy's views keep their mappings alive).
    """

    def __init__(self, limit: int | None = None, *, in_samples: bool = False) -> None:
        self._in_samples = in_samples
        self._held: dict[Path, _Held] = {}
        self._limit = limit
        self._lock = Lock()

    def get(self, path: Path) -> MappedFile:
        """Return the mapped file.

        Raises:
            UnreadableFile: the file cannot be opened, or is empty.
        """
        return self._hold(path, 0).file

    def with_bytes(self, segment: Segment) -> MappedFile:
        """Return the mapped file where the bytes of a segment are.

        Raises:
            UnreadableFile: the file cannot be opened, or is empty.
        """
        return self.get(segment.path) if segment.inflated is None else segment.inflated

    @contextmanager
    def using(self, segment: Segment) -> Iterator[MappedFile]:
        """Keep a file mapped while the bytes of a segment are used by their address.

        Raises:
            UnreadableFile: the file cannot be opened, or is empty.
        """
        if segment.inflated is not None:
            yield segment.inflated
            return
        held = self._hold(segment.path, 1)
        try:
            yield held.file
        finally:
            with self._lock:
                held.num_users -= 1

    def _hold(self, path: Path, num_users: int) -> _Held:
        with self._lock:
            held = self._touch(path, num_users)
        if held is not None:
            return held
        # Opened without the lock: on a parallel file system this takes milliseconds, and threads open many at a time.
        fresh = MappedFile(path, in_samples=self._in_samples)
        with self._lock:
            held = self._touch(path, num_users)
            if held is None:
                held = self._held[path] = _Held(fresh, num_users)
                doomed = self._to_close(path)
            else:
                doomed = fresh
        if doomed is not None:
            _close_quietly(doomed)
        return held

    def _touch(self, path: Path, num_users: int) -> _Held | None:
        held = self._held.pop(path, None)
        if held is not None:
            self._held[path] = held
            held.num_users += num_users
        return held

    def _to_close(self, newest: Path) -> MappedFile | None:
        """Remove and return the least recently used file that is not in use, if there are too many."""
        if self._limit is None or len(self._held) <= self._limit:
            return None
        path = next((path for path, held in self._held.items() if not held.num_users and path != newest), None)
        return None if path is None else self._held.pop(path).file

    def close(self, path: Path) -> None:
        """Close one file, if it is open."""
        with self._lock:
            held = self._held.pop(path, None)
        if held is not None:
            _close_quietly(held.file)

    def close_all(self) -> None:
        for path in list(self._held):
            self.close(path)


def _close_quietly(file: MappedFile) -> None:
    try:
        file.close()
    except BufferError:
        # A numpy view still uses the mapping, which is freed with the view.
        return


def many_open_files() -> int:
    """Raise this process's limit on open files to its hard limit; return how many files a pool may keep open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 4096 if hard == resource.RLIM_INFINITY else max(16, min(4096, hard // 4))


def equal_segments(a: tuple[Segment, ...], b: tuple[Segment, ...], files: FilePool) -> bool:
    """Whether two sequences of segments contain the same bytes, however each is split."""
    if sum(segment.num_bytes for segment in a) != sum(segment.num_bytes for segment in b):
        return False
    queue_a, queue_b = list(reversed(a)), list(reversed(b))
    while queue_a and queue_b:
        left, right = queue_a.pop(), queue_b.pop()
        length = min(left.num_bytes, right.num_bytes)
        if not _equal_bytes(left, right, length, files):
            return False
        queue_a += _rest(left, length)
        queue_b += _rest(right, length)
    return True


def _rest(segment: Segment, taken: int) -> list[Segment]:
    if segment.num_bytes == taken:
        return []
    return [replace(segment, offset=segment.offset + taken, num_bytes=segment.num_bytes - taken)]


def _equal_bytes(a: Segment, b: Segment, length: int, files: FilePool) -> bool:
    with files.using(a) as left, files.using(b) as right:
        return bool(_libc.memcmp(_locate(a, length, left), _locate(b, length, right), length) == 0)


def _locate(segment: Segment, length: int, file: MappedFile) -> int:
    file.require(segment.offset + length)
    file.expect(segment.offset, length)
    return file.address + segment.offset
