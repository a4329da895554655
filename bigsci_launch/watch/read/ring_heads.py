"""Whether the ranks of this machine have begun calls since the last look, by how many their rings have counted.

To read that takes 4 KiB a rank; the rank is not asked.
"""

from __future__ import annotations

import socket
import zlib
from contextlib import suppress
from pathlib import Path

from bigsci_launch.errors import BslError
from bigsci_launch.runs.layout import AttemptDir, rank_files, read_json
from bigsci_launch.safe_files import open_stream

LANES_AT, NAMES_AT = 256, 4096
"""Where a ring counts the calls of each thread: behind its heartbeat, in front of its names (diagnostics/ring_file.py).
"""


class RingHeads:
    """The rings of an attempt that are on this machine; those of other nodes are not seen."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._folders: dict[Path, tuple[int, Path | None]] = {}
        self._seen: dict[Path, int] = {}

    def have_moved(self) -> bool:
        """Whether any ring here has counted calls since this was asked last, or is new."""
        before, self._seen = self._seen, {}
        for folder in self._find_folders():
            with suppress(OSError):
                for path in folder.glob("*.ring"):
                    with open_stream(path) as stream:
                        self._seen[path] = zlib.crc32(stream.read(NAMES_AT)[LANES_AT:])
        return any(before.get(path) != lanes for path, lanes in self._seen.items())

    def _find_folders(self) -> set[Path]:
        """Return the folders of the rings. A record of a rank is read again only if it was replaced."""
        with suppress(BslError):
            for path in rank_files(self._attempt.pids, ".json").values():
                with suppress(OSError):
                    written = path.stat().st_mtime_ns
                    if self._folders.get(path, (0, None))[0] != written:
                        self._folders[path] = written, _folder_here(path)
        return {folder for _, folder in self._folders.values() if folder is not None}


def _folder_here(path: Path) -> Path | None:
    """Return the folder of a rank's ring; None if it has none, or runs elsewhere."""
    with suppress(BslError):
        record = read_json(path)
        if record.get("host") == socket.gethostname() and isinstance(record.get("rings"), str):
            return Path(record["rings"])
    return None
