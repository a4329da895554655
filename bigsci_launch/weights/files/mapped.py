"""Maps files into memory read-only and compares them with C's `memcmp`, without a copy and without numpy."""

from __future__ import annotations

import ctypes
import mmap
import resource
from pathlib import Path
from threading import Lock

from bigsci_launch.weights.files.tensors import Segment, UnreadableFile, os_reason

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcmp.restype = ctypes.c_int


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
    """A file mapped read-only; `address` is valid until `close`. An empty file is unreadable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self.memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UnreadableFile(path, os_reason(error)) from error
        except ValueError as error:
            raise UnreadableFile(path, "empty file") from error
        # Files are read once, front to back: the kernel can read further ahead and drop pages sooner.
        self.memory.madvise(mmap.MADV_SEQUENTIAL)
        self.address = _address(self.memory)

    def __len__(self) -> int:
        return len(self.memory)

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self.memory.close()


# Files that a limited pool keeps open. Two pools at a time then use half of the usual limit of 1024 open files.
MANY_FILES = 256


class FilePool:
    """Mapped files, opened on first use. Threads may share a pool.

    Without a `limit`, files stay open until they are closed. With a limit (2 or more), the least recently used file is
    closed; only one thread at a time may then compare bytes by address (numpy's views keep their mappings alive).
    """

    def __init__(self, limit: int | None = None) -> None:
        self._files: dict[Path, MappedFile] = {}
        self._limit = limit
        self._lock = Lock()

    def get(self, path: Path) -> MappedFile:
        """Return the mapped file.

        Raises:
            UnreadableFile: the file cannot be opened, or is empty.
        """
        with self._lock:
            file = self._files.pop(path, None) or MappedFile(path)
            self._files[path] = file
            if self._limit is not None and len(self._files) > self._limit:
                _close_quietly(self._files.pop(next(iter(self._files))))
            return file

    def close(self, path: Path) -> None:
        """Close one file, if it is open."""
        with self._lock:
            file = self._files.pop(path, None)
        if file is not None:
            _close_quietly(file)

    def close_all(self) -> None:
        for path in list(self._files):
            self.close(path)


def _close_quietly(file: MappedFile) -> None:
    try:
        file.close()
    except BufferError:
        # A numpy view still uses the mapping, which is freed with the view.
        return


def allow_many_files() -> None:
    """Raise this process's limit on open files to its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
    return [Segment(segment.path, segment.offset + taken, segment.num_bytes - taken)]


def _equal_bytes(a: Segment, b: Segment, length: int, files: FilePool) -> bool:
    at_a, at_b = _locate(a, length, files), _locate(b, length, files)
    return bool(_libc.memcmp(at_a, at_b, length) == 0)


def _locate(segment: Segment, length: int, files: FilePool) -> int:
    file = files.get(segment.path)
    if segment.offset + length > len(file):
        raise UnreadableFile(segment.path, "shorter than a moment ago: another process is writing to it")
    return file.address + segment.offset
