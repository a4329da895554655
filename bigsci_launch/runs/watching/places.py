"""Where watchers write, opened by descriptor: those of the run's owner in `watch/`, each other's in `watch/by/UID/`.

What the owner's processes go by lies in folders and files that only they can write, which is checked each time: a
link, a folder of another user, or one that others may write, is refused.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bigsci_launch.procfs import user_name
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.ownership import owner_of
from bigsci_launch.safe_files import OTHERS_WRITE, make_folder, open_folder

WATCH_MODE, SHARED_MODE, OWN_MODE = 0o2755, 0o3775, 0o755
MOST_COLLEAGUES = 50
_BY = "by"
_UID = re.compile(r"[0-9]{1,10}")


def is_owner(run: RunDir) -> bool:
    """Whether this process runs as the owner of the run. Root does not: it would follow what others wrote."""
    return owner_of(run) == os.geteuid()


@contextmanager
def open_watch(run: RunDir, *below: str, makes: bool = False) -> Iterator[int]:
    """Open `watch/` of a run, or a folder in it; with `makes`, it is made if it is missing.

    Raises:
        OSError: it is missing, a link, not the owner's, or one in which others may write; or this process is not the
            owner's, and would make or change something.
    """
    if makes:
        _require_owner(run)
    with ExitStack() as stack:
        folder = stack.enter_context(open_folder(run.path, follow=True))
        for name in (run.watch.name, *below):
            if makes:
                _make(folder, name, WATCH_MODE)
            folder = stack.enter_context(open_folder(name, folder=folder))
            require_own(os.fstat(folder), owner_of(run), run.watch / "/".join(below))
        if makes and not below:
            _make(folder, _BY, SHARED_MODE)
        yield folder


@contextmanager
def open_to_write(run: RunDir) -> Iterator[int]:
    """Open the folder in which this process leaves what it has to say of a run. Raises OSError if it has none."""
    if is_owner(run):
        with open_watch(run, makes=True) as folder:
            yield folder
        return
    with _open_by(run) as place:
        name = str(os.geteuid())
        _make(place, name, OWN_MODE)
        with open_folder(name, folder=place) as folder:
            require_own(os.fstat(folder), os.geteuid(), run.watch_by(os.geteuid()))
            yield folder


def colleagues(run: RunDir) -> list[int]:
    """Return the users other than the owner who have left something in `watch/by/`."""
    try:
        with _open_by(run) as place:
            found = sorted(int(name) for name in names_in(place) if _UID.fullmatch(name))
    except OSError:
        return []
    return [uid for uid in found if uid != owner_of(run)][:MOST_COLLEAGUES]


@contextmanager
def open_of(run: RunDir, uid: int) -> Iterator[int]:
    """Open the folder in which the user `uid` leaves something, to read it. Raises OSError if it is not theirs."""
    with _open_by(run) as place, open_folder(str(uid), folder=place) as folder:
        require_own(os.fstat(folder), uid, run.watch_by(uid))
        yield folder


@contextmanager
def _open_by(run: RunDir) -> Iterator[int]:
    with open_watch(run) as watch, open_folder(_BY, folder=watch) as place:
        yield place


def names_in(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def require_own(found: os.stat_result, owner: int, path: Path) -> None:
    """Raise PermissionError unless `path`, which was found so, belongs to `owner`, and no other user may write it."""
    if found.st_uid != owner:
        owners = f"it belongs to {user_name(found.st_uid)}, not to {user_name(owner)}"
        raise PermissionError(errno.EPERM, owners, str(path))
    if found.st_mode & OTHERS_WRITE:
        raise PermissionError(errno.EPERM, f"other users may write it: chmod go-w {path}", str(path))


def _require_owner(run: RunDir) -> None:
    if not run.path.exists():
        make_folder(run.path)  # what is known of a job that bsl did not submit
    if not is_owner(run):
        raise PermissionError(errno.EPERM, f"only {user_name(owner_of(run))} may write it", str(run.watch))


def _make(folder: int, name: str, mode: int) -> None:
    """Make a folder of exactly this mode and of the group of `folder`, unless it is there."""
    try:
        os.mkdir(name, mode & 0o755, dir_fd=folder)
    except FileExistsError:
        return
    with open_folder(name, folder=folder) as made:
        with suppress(OSError):
            os.fchown(made, -1, os.fstat(folder).st_gid)
        os.fchmod(made, mode)
