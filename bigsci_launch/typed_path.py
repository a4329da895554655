"""Files whose path the user typed, the only ones where links are followed; all others are written by `safe_files`."""

from __future__ import annotations

from pathlib import Path

from bigsci_launch.safe_files import write_file


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
