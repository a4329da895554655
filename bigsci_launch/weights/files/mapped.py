"""Maps files into memory read-only and compares them with C's `memcmp`, without a copy and without numpy."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from bigsci_launch.units import format_bytes
from bigsci_launch.weights.files.tensors import Segment, UnreadableFile, os_reason

# What is no regular file. Opening or reading it could wait for ever, or change something.
KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcmp.restype = ctypes.c_int


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for anybody who writes to it.

    Raises:
        UnreadableFile: it cannot be opened, or is no regular file.
    """
    try:
        _require_regular(path, path.stat())
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        stream = os.fdopen(handle, "rb")
        _require_regular(path, os.fstat(handle))
    except OSError as error:
        raise UnreadableFile(path, os_reason(error)) from error
    except ValueError as error:
        raise UnreadableFile(path, "no file can have this name") from error
    return stream


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableFile(
            path, f"{KINDS.get(stat.S_IFMT(status.st_mode), 'of an unknown kind')}: not a regular file"
        )


def read_small_file(path: Path, limit: int) -> bytes:
    """Return the bytes of a file that has at most `limit`.

    Raises:
        UnreadableFile: it cannot be read, is no regular file, or is larger.
    """
    try:
        with open_file(path) as stream:
            found = stream.read(limit + 1) if os.fstat(stream.fileno()).st_size <= limit else None
    except OSError as error:
        raise UnreadableFile(path, os_reason(error)) from error
    if found is None or len(found) > limit:
        raise UnreadableFile(path, f"larger than {format_bytes(limit)}, the most that is read of such a file")
    return found


class _Buffer(ctypes.Structure):
    """`Py_buffer` (part of CPython's stable interface since 3.11, unchanged since 3.3)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address(mapping: mmap.mmap) -> int:
    # ctypes' own from_buffer refuses read-only memory. A writable private mapping of a large file is no way out: some
    # kernels count it against the machine's memory and refuse it.
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(mapping), ctypes.byref(buffer), 0)
    address = int(buffer.buf)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


class MappedFile:
    """A file mapped read-only; `address` is valid until `close`. An empty file is unreadable.

    With `in_samples`, the kernel does not read ahead, except what `expect` announces. Given an open `stream`, that file
    is mapped, which was made of the one at `path`.
    """

    def __init__(self, path: Path, *, in_samples: bool = False, stream: BinaryIO | None = None) -> None:
        self.path = path
        self.in_samples = in_samples
        try:
            with open_file(path) if stream is None else stream as stream:
                self.status = os.fstat(stream.fileno())
                self.memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UnreadableFile(path, os_reason(error)) from error
        except ValueError as error:
            raise UnreadableFile(path, "empty file") from error
        # Files are read once, front to back: the kernel can read further ahead and drop pages sooner.
        self.memory.madvise(mmap.MADV_RANDOM if in_samples else mmap.MADV_SEQUENTIAL)
        self.address = _address(self.memory)

    def __len__(self) -> int:
        return len(self.memory)

    def require(self, end: int) -> None:
        """Require that the file still has `end` bytes: the system ends a program that reads a mapping past them.

        Raises:
            UnreadableFile: the file has become shorter.
        """
        if end > min(len(self.memory), self.memory.size()):
            raise UnreadableFile(self.path, "shorter than a moment ago: another process is writing to it")

    def expect(self, offset: int, length: int) -> None:
        """Announce which bytes of a file that is read in samples are read next, so that they are read at once."""
        if self.in_samples:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self.memory.madvise(mmap.MADV_WILLNEED, start, offset + length - start)

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self.memory.close()


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
        """Remove and return the least recently used file that nobody uses, if there are too many."""
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
