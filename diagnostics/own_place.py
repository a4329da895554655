"""Whose place is a run in? What a job starts hours after it looked at it must still be what it looked at.

Whoever may rename a folder above a run can put a run of theirs in its place, at any moment between a look and a start.
So, as sshd has it for keys, the folders above count as much as the files: where nobody else may rename them, a path
that was looked at stays what it was. Folders of other people above the root of the runs are said, and not refused: on
many machines nobody could start a run then. Standard library only, for any Python from 3.8 on: the same file is in
`diagnostics/`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH


def open_above(run: Path) -> list[Path]:
    """Return the folders above a run in which others may rename what leads to it, the innermost first.

    `run` is absolute and without links. What is not there yet will be ours. Below a folder of ours that nobody else may
    enter, the modes do not matter.

    Raises:
        OSError: a folder cannot be looked at.
    """
    found: list[Path] = []
    for above in run.parents:
        try:
            seen = above.stat()
        except FileNotFoundError:
            continue
        if seen.st_uid == os.geteuid() and not seen.st_mode & OTHERS_ENTER:
            found.clear()
        elif others_may_rename(seen):
            found.append(above)
    return found


def others_may_rename(folder: os.stat_result) -> bool:
    """Whether somebody else than its owner may rename what is in a folder. A group without other members is nobody."""
    if folder.st_mode & stat.S_ISVTX:
        return False
    by_group = folder.st_mode & stat.S_IWGRP and not _is_own_group(folder.st_gid)
    return bool(folder.st_mode & stat.S_IWOTH or by_group)


def _is_own_group(number: int) -> bool:
    """Whether a group is the one that many systems make for each user, with the user's name, and has nobody else in it:
    there the umask is 002 by default."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return user.pw_gid == number and group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}


def mendable(run: Path, folders: list[Path]) -> list[Path]:
    """Return those of the open folders above a run that need not be so: its root, in whose place another one may be
    named, and those that are ours."""
    return [each for each in folders if each == run.parent or each.stat().st_uid == os.geteuid()]


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing. The group may not write in them, whatever the umask.

    Raises:
        OSError: one cannot be made.
    """
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(mode=0o755, exist_ok=True)


def why_not_ours(tools: Path) -> str | None:
    """Return why the tools of an attempt may be somebody else's by now; None if they are not, or belong to no run.

    To be asked right before each start of one of them, with an absolute path. Nobody else may write the files in a
    folder that is ours and closed, in a place where the folders above are.
    """
    attempt, attempts = tools.parent, tools.parent.parent
    if (tools.name, attempts.name) != ("tools", "attempts"):
        return None
    run = attempts.parent
    try:
        for folder in (run, attempts, attempt, tools):
            seen = folder.lstat()
            if seen.st_uid not in (0, os.geteuid()) or seen.st_mode & OTHERS_WRITE or not stat.S_ISDIR(seen.st_mode):
                return f"somebody else may have written {folder}"
        inside = mendable(run, open_above(run))
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return f"others may rename folders in {inside[0]}" if inside else None
