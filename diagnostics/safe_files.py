"""Files that other users or other processes may touch: written whole or not at all, read without following links.

Links are followed only where the user typed the path: callers resolve that path themselves. Standard library only, for
any Python from 3.8 on: the same file is in `diagnostics/`, where the programs of a job import it.
"""

from __future__ import annotations

import errno
import os
import stat

# Nodes import this for every question of `bsl spy`: contextlib, json, pathlib and typing take 4 to 8 ms each.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Any, BinaryIO

LARGEST_TEXT = 64 << 20
"""Bytes of the largest file that is read as a whole."""
DEEPEST = 200
"""The deepest nesting of JSON that is read."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def write_file(path: Path, text: str | bytes, mode: int = 0o644, *, is_synced: bool = True) -> None:
    """Replace `path` by a file of this text and exactly this mode: readers see the old file or the new one.

    The folder is opened once. A link in the place of the file is replaced, and its target stays as it is. What is not
    `is_synced` may be lost with its machine, but does not wait for a disk.

    Raises:
        OSError: nothing has changed then.
    """
    with open_folder(path.parent, follow=True) as folder:
        write_in(folder, path.name, text, mode, is_synced=is_synced)


def write_in(folder: int, name: str, text: str | bytes, mode: int = 0o644, *, is_synced: bool = True) -> None:
    """Replace the file `name` in an open folder, as `write_file`; file and folder are synced, if `is_synced`."""
    part = f".{name}.{os.urandom(8).hex()}"
    handle = os.open(part, _NEW, 0o600, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text.encode() if isinstance(text, str) else text)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            if is_synced:
                os.fsync(stream.fileno())
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        try:
            os.unlink(part, dir_fd=folder)
        except OSError:
            pass
        raise
    try:
        if is_synced:
            os.fsync(folder)
    except OSError:  # some file systems cannot sync a folder
        pass


def append_line(path: Path | str, line: str, mode: int = 0o644, *, folder: int | None = None) -> None:
    """Append a line in one write; the file is made with exactly this mode if it is not there. Links are refused.

    `path` is relative to the open `folder` if given.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        handle = os.open(path, flags, dir_fd=folder)
    except FileNotFoundError:
        try:
            handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        except FileExistsError:
            handle = os.open(path, flags, dir_fd=folder)
        else:
            os.fchmod(handle, mode)
    try:
        _require_regular(handle, str(path))
        os.write(handle, line.encode() + b"\n")
    finally:
        os.close(handle)


class open_folder:
    """Open a folder, for calls with `dir_fd`; a link is refused unless `follow`. `path` is relative to `folder`."""

    __slots__ = ("_flags", "_folder", "_inside", "_path")

    def __init__(self, path: Path | str, *, follow: bool = False, folder: int | None = None) -> None:
        self._path, self._flags, self._inside = path, _FOLDER if follow else _FOLDER | os.O_NOFOLLOW, folder

    def __enter__(self) -> int:
        self._folder = os.open(self._path, self._flags, dir_fd=self._inside)
        return self._folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._folder)


def open_lock(path: Path) -> int:
    """Open the file by which the users of a folder exclude each other: whoever may write there may lock it.

    The umask of the one who makes it does not count. One that only its owner may write is opened to be read, which is
    enough for `flock` except on NFS.

    Raises:
        OSError: it cannot be made or opened, or is a link or a pipe.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open_folder(path.parent, follow=True) as folder:
        try:
            handle = os.open(path.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666, dir_fd=folder)
        except FileExistsError:
            return _open_made(path, flags, folder)
        _share(handle, os.fstat(folder))
        return handle


def _open_made(path: Path, flags: int, folder: int) -> int:
    try:
        handle = os.open(path.name, os.O_RDWR | flags, dir_fd=folder)
    except PermissionError:
        handle = os.open(path.name, os.O_RDONLY | flags, dir_fd=folder)
    try:
        _require_regular(handle, str(path))
    except OSError:
        os.close(handle)
        raise
    return handle


def _share(handle: int, folder: os.stat_result) -> None:
    """Let those write a new file who may write in its folder."""
    try:
        os.fchown(handle, -1, folder.st_gid)
    except OSError:
        pass
    is_same_group = os.fstat(handle).st_gid == folder.st_gid
    writers = folder.st_mode & (OTHERS_WRITE if is_same_group else stat.S_IWOTH)
    os.fchmod(handle, 0o600 | writers | writers << 1)


def open_stream(path: Path | str, *, follow: bool = False, folder: int | None = None) -> BinaryIO:
    """Open a regular file to be read, without waiting: opening a pipe waits for a writer.

    `path` is relative to the open `folder` if given. A link is refused unless `follow`; the folders above may be links.

    Raises:
        OSError: it is missing, a link, a pipe, a socket, a device or a folder.
    """
    try:
        handle = os.open(path, _READ if follow else _READ | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise _not_regular(str(path)) from None
        if error.errno != errno.ELOOP or follow:
            raise
        raise OSError(errno.ELOOP, "a symbolic link, which is not followed here", str(path)) from None
    try:
        _require_regular(handle, str(path))
        os.set_blocking(handle, True)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_file(path: Path | str, limit: int = LARGEST_TEXT, *, follow: bool = False, folder: int | None = None) -> bytes:
    """Return the content of a regular file that `open_stream` opens.

    Raises:
        OSError: as `open_stream`, or it is larger than `limit` bytes.
    """
    content, _ = read_file_of(path, limit, follow=follow, folder=folder)
    return content


def read_file_of(
    path: Path | str, limit: int = LARGEST_TEXT, *, follow: bool = False, folder: int | None = None
) -> tuple[bytes, os.stat_result]:
    """Return the content of a regular file, and what was read is whose; see `read_file`."""
    with open_stream(path, follow=follow, folder=folder) as stream:
        found = os.fstat(stream.fileno())
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content, found


def _require_regular(handle: int, name: str) -> None:
    mode = os.fstat(handle).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(mode):
        raise _not_regular(name)


def _not_regular(name: str) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", name)


def read_json(path: Path | str, limit: int = LARGEST_TEXT, *, folder: int | None = None) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: as `read_file`.
        ValueError: as `parse_json`.
    """
    return parse_json(read_file(path, limit, folder=folder))


def parse_json(text: str | bytes, limit: int = LARGEST_TEXT, *, allow_nan: bool = False) -> Any:
    """Return what a JSON text holds. With `allow_nan` numbers may be NaN or infinite, as losses are.

    Raises:
        ValueError: it is no JSON, larger than `limit`, nested deeper than DEEPEST, or it holds a number that is not
            finite or a character that cannot be written.
    """
    if len(text) > limit:
        raise ValueError(f"JSON of more than {limit} characters")
    words = text.decode("utf-8") if isinstance(text, (bytes, bytearray)) else text
    if words.count("[") + words.count("{") > DEEPEST and _depth(words) > DEEPEST:
        raise ValueError(f"JSON nested deeper than {DEEPEST}")
    decode, find_half_character = _reader(allow_nan)
    try:
        found = decode(words)
    except RecursionError:
        raise ValueError("not JSON: its brackets do not match") from None
    if "\\u" in words and find_half_character(words):
        _require_writable(found)
    return found


_readers: dict[bool, tuple[Any, Any]] = {}


def _reader(allow_nan: bool) -> tuple[Any, Any]:
    """Return what decodes, and what finds a surrogate.

    Made once, since a log has thousands of lines; and not before it is needed, since json takes 8 ms to import.
    """
    if allow_nan not in _readers:
        import json
        import re

        decoder = json.JSONDecoder(
            parse_float=None if allow_nan else _finite, parse_constant=None if allow_nan else _refuse_constant
        )
        _readers[allow_nan] = decoder.decode, re.compile(r"\\u[dD][89a-fA-F]").search
    return _readers[allow_nan]


_MARKS = bytes.maketrans(b"{}", b"[]")
_NO_MARK = bytes(set(range(256)) - set(b'[]{}"\\'))
_QUICK_ROUNDS = 16


def _depth(words: str) -> int:
    """Return the deepest nesting of brackets outside of strings."""
    marks = words.encode("utf-8", "replace").translate(_MARKS, _NO_MARK)
    outside = marks.replace(b'""', b"")  # most strings have no brackets
    if b'"' in outside or b"\\" in outside:
        unescaped = marks.replace(b"\\\\", b"").replace(b'\\"', b"")
        outside = b"".join(unescaped.split(b'"')[::2])
    for rounds in range(_QUICK_ROUNDS):
        if not outside:
            return rounds
        outside = outside.replace(b"[]", b"")  # the innermost
    depth = deepest = 0
    for mark in outside:
        depth += 1 if mark == 0x5B else -1
        deepest = max(deepest, depth)
    return deepest + _QUICK_ROUNDS


_INFINITE = (float("inf"), float("-inf"))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"JSON with {name}")


def _finite(text: str) -> float:
    number = float(text)
    if number in _INFINITE:
        raise ValueError(f"JSON with the number {text[:20]}")
    return number


def _require_writable(found: Any) -> None:
    """Refuse lone surrogates: UnicodeEncodeError is a ValueError."""
    import json

    json.dumps(found, ensure_ascii=False).encode()


def make_folder(path: Path, mode: int = 0o755) -> None:
    """Make a folder, and those above it, unless it is there; a new one has exactly this mode, whatever the umask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    with open_folder(path) as folder:
        os.fchmod(folder, mode)


def others_may_write(found: os.stat_result) -> bool:
    """Return whether other users than its owner may change a file, or what is in a folder that is not sticky."""
    is_sticky = stat.S_ISDIR(found.st_mode) and bool(found.st_mode & stat.S_ISVTX)
    return bool(found.st_mode & OTHERS_WRITE) and not is_sticky
