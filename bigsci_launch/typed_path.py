"""Files whose path the user typed, or wrote into a configuration: here links are followed, and `<(command)` is read.

All others are written by `safe_files`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from bigsci_launch.safe_files import open_stream, others_may_write, write_file

OWN_STREAMS = (Path("/dev/fd"), Path("/proc/self/fd"))
"""Where the shell names the pipe of `<(command)`."""
STDIN = Path("/dev/stdin")
MOST_LINKS = 40
"""As for the kernel."""


def open_typed(path: Path) -> BinaryIO:
    """Open a file to be read. A pipe is read only where it is one that the shell has opened for this command.

    Raises:
        OSError: as `open_stream`.
    """
    return path.open("rb") if path == STDIN or path.parent in OWN_STREAMS else open_stream(path, follow=True)


def write_typed(path: Path, text: str) -> None:
    """Replace the file at a path that the user typed. The folder is made if it is missing.

    A link stays, and its target is replaced, unless another user may have made the link. Into a device, such as
    /dev/null, and into what is open in this process, as /dev/stdout is, the text is just written.

    Raises:
        OSError: nothing has changed then, if it was a file.
    """
    path = _target(path)
    if path.parent in OWN_STREAMS:
        _write_into(os.dup(_number(path)), text)
    elif path.exists() and not path.is_file():
        _write_into(_open_device(path), text)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)


def _target(path: Path) -> Path:
    """Follow links, except those that another user may have made, as the kernel does in sticky folders."""
    for _ in range(MOST_LINKS):
        if path.parent in OWN_STREAMS or not path.is_symlink():
            return path
        if not _is_trusted(path):
            raise OSError(errno.EACCES, "a symbolic link of another user is not followed here", str(path))
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _is_trusted(link: Path) -> bool:
    folder, ours = link.parent.stat(), (0, os.geteuid())
    return link.lstat().st_uid in ours or (folder.st_uid in ours and not others_may_write(folder))


def _number(stream: Path) -> int:
    if not stream.name.isdecimal():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(stream))
    return int(stream.name)


def _open_device(path: Path) -> int:
    """Open a device, but no pipe: another user may put one into a shared folder and never read it."""
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISCHR(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    os.set_blocking(handle, True)
    return handle


def _write_into(handle: int, text: str) -> None:
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
