"""The folder of the demonstration: it is marked, and only the runs that a demonstration made are ended and deleted."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bigsci_launch.errors import BslError, RunDirError
from bigsci_launch.runs.attempts import read_job
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.safe_files import read_file_of, write_file

MARKER = ".bsl-demo"
TEXT = "`bsl demo` works in this folder: the next one deletes runs/undisturbed, runs/stopped and runs/hangs.\n"
UNDISTURBED, STOPPED, HANGS = "undisturbed", "stopped", "hangs"
RUNS = (UNDISTURBED, STOPPED, HANGS)


def prepare_folder(folder: Path) -> None:
    """Make the folder, or delete from it what an earlier demonstration has left; other runs in it stay.

    Raises:
        BslError: the folder holds something, and it is not a demonstration of this user.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_marked(folder):
            if any(folder.iterdir()):
                raise _not_ours(folder, "it is not empty, and `bsl demo` did not make it")
            write_file(folder / MARKER, TEXT)
        if (folder / "runs").is_symlink():
            raise _not_ours(folder, "its `runs` is a link")
        for name in RUNS:
            _remove(folder / "runs" / name)
    except OSError as error:
        raise BslError(f"{error.filename or folder}: {error.strerror}", hint="name another --folder") from error


def _is_marked(folder: Path) -> bool:
    """Whether this user's demonstration works in the folder.

    Raises:
        BslError: that of another user does; the processes that its records name may be any user's.
    """
    try:
        _, found = read_file_of(folder / MARKER)
    except FileNotFoundError:
        return False
    if found.st_uid != os.geteuid():
        raise _not_ours(folder, f"it is the demonstration of uid {found.st_uid}")
    return True


def _not_ours(folder: Path, why: str) -> BslError:
    return BslError(f"{folder}: {why}; nothing was deleted", hint="name a new folder: bsl demo --folder DIR")


def _remove(path: Path) -> None:
    """End and delete a run of an earlier demonstration. A link in its place is removed, and its target stays."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        with suppress(RunDirError):  # what cannot be read is removed all the same
            end_run(RunDir(path))
        shutil.rmtree(path)


def end_run(run: RunDir) -> None:
    """End the ranks that an earlier demonstration has left, because it was killed.

    Raises:
        BslError: some are still there after a while.
    """
    attempt = run.latest_attempt()
    record = read_job(attempt) if attempt is not None else None
    launcher = record.launcher if record is not None else None
    if attempt is None or launcher is None or not launcher.is_alive:
        return
    for _ in range(2):  # the second time, ranks that hang are killed at once
        launcher.terminate(attempt.path)
        time.sleep(0.5)
    wait_until(f"run {run.name} of an earlier demonstration has ended", lambda: not launcher.is_alive)


def wait_until(what: str, holds: Callable[[], bool], *, timeout_s: float = 90.0) -> None:
    """Wait until `holds()` is true.

    Raises:
        BslError: it was still false after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise BslError(f"waited {timeout_s:.0f} s in vain until {what}", hint="see demo.log and `bsl list`")
        time.sleep(0.3)
