"""Opens files and maps them into memory, read-only."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

from bigsci_launch.errors import CheckpointError
from bigsci_launch.units import format_bytes
from bigsci_launch.weights.files.instead import what_instead

# What is no regular file. Opening or reading it could wait for ever, or change something.
KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class UnreadableFile(CheckpointError):
    """One file of a checkpoint (`path`) cannot be read; `why` is the reason. The other files still can."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


def os_reason(error: OSError) -> str:
    """Return the system's message in lower case: `permission denied`."""
    return (error.strerror or str(error)).lower()


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for a writer.

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
        UnreadableFile: it cannot be read, is no regular file, is larger, or only takes the place of such a file.
    """
    try:
        with open_file(path) as stream:
            found = stream.read(limit + 1) if os.fstat(stream.fileno()).st_size <= limit else None
    except OSError as error:
        raise UnreadableFile(path, os_reason(error)) from error
    if found is None or len(found) > limit:
        raise UnreadableFile(path, f"larger than {format_bytes(limit)}, the most that is read of such a file")
    if (instead := what_instead(found)) is not None:
        raise UnreadableFile(path, instead)
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
    """A file mapped read-only; `address` is valid until `close`. A file is unreadable if it is empty, or only takes the
    place of one with weights.

    With `in_samples`, the kernel does not read ahead, except what `expect` announces. Given an open `stream`, that file
    is mapped, which was made of the one at `path`.
    """

    def __init__(self, path: Path, *, in_samples: bool = False, stream: BinaryIO | None = None) -> None:
        self.path = path
        self.in_samples = in_samples
        is_made = stream is not None
        try:
            with open_file(path) if stream is None else stream as stream:
                self.status = os.fstat(stream.fileno())
                self.memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UnreadableFile(path, os_reason(error)) from error
        except ValueError as error:
            raise UnreadableFile(path, "empty file") from error
        if not is_made and (instead := what_instead(self.memory)) is not None:
            self.memory.close()
            raise UnreadableFile(path, instead)
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
