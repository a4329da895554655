"""The lease of a local attempt: a file whose time its launcher renews, so that other hosts see that it runs.

Only that the time changes means something. Clocks of hosts and file servers differ, so nothing is decided by its age.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RENEW_S = 5.0
LOOK_S = 3 * RENEW_S
"""For how long a lease is looked at before it counts as not renewed."""
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@contextmanager
def kept_lease(path: Path) -> Iterator[None]:
    """Renew the lease while the context lasts. A thread does it, so that a file system that hangs delays nothing."""
    ended = threading.Event()
    threading.Thread(target=_keep, args=(path, ended), name="lease", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _keep(path: Path, ended: threading.Event) -> None:
    while True:
        with suppress(OSError):  # the disk may be full, or gone for a while
            renew(path)
        if ended.wait(RENEW_S):
            return


def renew(path: Path) -> None:
    """Set the time of the lease to now, by the clock of its file system. Raises OSError if it cannot be written."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | _FLAGS, 0o644)
    try:
        os.utime(handle)
    finally:
        os.close(handle)


def renewed_at(path: Path) -> float | None:
    """Return the time of the last renewal, by the clock of the file system; None if there was none.

    The file is opened: only then does NFS ask its server again.
    """
    try:
        handle = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return None
    try:
        return os.fstat(handle).st_mtime
    finally:
        os.close(handle)


def is_renewed(path: Path, within_s: float = LOOK_S) -> bool:
    """Wait until the lease is renewed, for `within_s` at most, and return whether it was."""
    before, deadline = renewed_at(path), time.monotonic() + within_s
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if renewed_at(path) != before:
            return True
    return False
