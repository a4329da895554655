"""Files whose path the user typed, or wrote into a configuration: here links are followed, and `<(command)` is read.

All others are written by `safe_files`.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from bigsci_launch.safe_files import open_stream, write_file

OWN_STREAMS = (Path("/dev/fd"), Path("/proc/self/fd"))
"""Where the shell names the pipe of `<(command)`."""
STDIN = Path("/dev/stdin")


def open_typed(path: Path) -> BinaryIO:
    """Open a file to be read. A pipe is read only where it is one that the shell has opened for this command.

    Raises:
        OSError: as `open_stream`.
    """
    return path.open("rb") if path == STDIN or path.parent in OWN_STREAMS else open_stream(path, follow=True)


def write_typed(path: Path, text: str) -> None:
    """Replace the file at a path that the user typed. The folder is made if it is missing.

    A link stays, and its target is replaced. Into what is no file, as /dev/stdout may be, the text is just written.

    Raises:
        OSError: nothing has changed then, if it was a file.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
        return
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text)
