"""The journal of a long comparison: which bytes were found equal, so that a later call need not read them again.

The first line says what the file is. Each further line is the digest of one portion: of the files' paths, sizes, inodes
and times of change, and of the ranges that were compared. The portions of a file that has changed since have other
digests, and so have those of other files. A damaged line is the digest of no portion.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock

from bigsci_launch.errors import CheckpointError
from bigsci_launch.safe_files import open_stream
from bigsci_launch.weights.compare.work import Piece
from bigsci_launch.weights.files.mapped import FilePool
from bigsci_launch.weights.files.tensors import Segment, os_reason

HEADER = b"bsl diff-weights journal 1\n"
# A file that was written this short a time ago may change again without another time of change.
SETTLED_S = 2.0


def _read(path: Path) -> bytes:
    try:
        with open_stream(path, follow=True) as stream:
            return stream.read()
    except FileNotFoundError:
        return b""


class Journal:
    """A journal that is open for this call. Threads may share it.

    Raises:
        CheckpointError: the file cannot be read or written, or is something other than a journal.
    """

    def __init__(self, path: Path) -> None:
        self._lock = Lock()
        try:
            if path.exists() and not path.is_file():
                raise CheckpointError(f"{path}: not a regular file", hint="name another journal")
            known = _read(path)
            if known and not known.startswith(HEADER):
                raise CheckpointError(f"{path}: not a journal of `bsl diff-weights`", hint="name another journal")
            self._known = frozenset(known.splitlines()[1:])
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
            # The last line may be half written, if the call that wrote it was killed.
            os.write(self._handle, b"" if known.endswith(b"\n") else b"\n" if known else HEADER)
        except OSError as error:
            raise CheckpointError(f"{path}: {os_reason(error)}", hint="name a journal that can be written") from error

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def add(self, key: bytes) -> None:
        """Record a portion that was found equal."""
        with self._lock:
            os.write(self._handle, key + b"\n")

    def key_of(self, portion: Sequence[Piece], files: FilePool) -> bytes | None:
        """Return the digest of a portion; None if it has no bytes, if they are compressed, or may still be changing.

        Raises:
            UnreadableFile: a file cannot be opened.
        """
        digest = blake2b(digest_size=16)
        for piece in portion:
            if not piece.a:
                return None
            for segment in (*piece.a, *piece.b):
                identity = _identity(segment, files)
                if identity is None:
                    return None
                digest.update(identity)
            digest.update(b"%d" % len(piece.a))
        return digest.hexdigest().encode()


def _identity(segment: Segment, files: FilePool) -> bytes | None:
    if segment.inflated is not None:
        return None
    found = files.get(segment.path).status
    if time.time() - max(found.st_mtime, found.st_ctime) < SETTLED_S:
        return None
    # Not the device: on another node, the same file system may have another number.
    numbers = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, segment.offset, segment.num_bytes)
    return f"{segment.path.absolute()}\0{','.join(map(str, numbers))}\0".encode(errors="surrogateescape")
