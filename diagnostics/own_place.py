"""Whose place is a run in? What a job starts hours after it looked at it must still be what it looked at.

A user who may rename a folder above a run can put another run in its place, at any moment between a look and a start.
So, as sshd has it for keys, the folders above count as much as the files: where no other user may rename them, a
path that was checked stays what it was. Folders of other users above the root of the runs are reported, not refused: on
many machines no run could start then. Standard library only, for any Python from 3.8 on: the same file is in
`diagnostics/`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
GETENT_TIMEOUT_S = 5.0


def open_above(run: Path) -> list[Path]:
    """Return the folders above a run in which others may rename what leads to it, the innermost first.

    `run` is absolute and without links. What is not there yet will be ours. Below a folder that only we can enter,
    the modes do not matter.

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
        elif others_may_rename(above, seen):
            found.append(above)
    return found


def others_may_rename(path: Path, folder: os.stat_result) -> bool:
    """Whether other users than its owner may rename what is in a folder. A group of the owner alone does not count."""
    if folder.st_mode & stat.S_ISVTX:
        return False
    by_group = folder.st_mode & stat.S_IWGRP and (_names_others(path) or not _is_own_group(folder.st_gid))
    return bool(folder.st_mode & stat.S_IWOTH or by_group)


def _names_others(path: Path) -> bool:
    """Whether a folder has an access control list: then the mode's bits for the group hold for whom it names."""
    return bool(_attribute(path, "system.posix_acl_access")) or _names_more(_attribute(path, "system.nfs4_acl"))


def _attribute(path: Path, name: str) -> bytes:
    try:
        return os.getxattr(path, name)
    except OSError:  # it has none, or its file system knows none
        return b""


def _names_more(entries: bytes) -> bool:
    """Whether an NFSv4 list, which every file there has, names more than the owner, the group and everyone."""
    count, at = int.from_bytes(entries[:4], "big"), 4
    for _ in range(count):
        length = int.from_bytes(entries[at + 12 : at + 16], "big")
        if entries[at + 16 : at + 16 + length] not in (b"OWNER@", b"GROUP@", b"EVERYONE@"):
            return True
        at += 16 + (length + 3) // 4 * 4
    return False


def _is_own_group(number: int) -> bool:
    """Whether a group is the one that many systems make for each user, with the user's name, and has no other member:
    there the umask is 002 by default."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    is_named_alike = user.pw_gid == number and group.gr_name == user.pw_name
    return is_named_alike and not set(group.gr_mem) - {user.pw_name} and not _is_group_of_another(number)


def _is_group_of_another(number: int) -> bool:
    """Whether it is the first group of another account: the members of a group do not name those. Where the machine
    does not list its accounts in time, it may be. `getpwall` could not be given up."""
    import subprocess

    path = {"PATH": f"{os.environ.get('PATH', '')}:/usr/bin:/bin"}
    try:
        listed = subprocess.check_output(
            ["getent", "passwd"],
            env=path,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=GETENT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return True
    accounts = [line.split(b":") for line in listed.splitlines()]
    return any(each[3:4] == [b"%d" % number] and each[2] != b"%d" % os.geteuid() for each in accounts)


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
    """Return why the tools of an attempt may be another user's by now; None if they are not, or belong to no run.

    To be asked right before each start of one of them, with an absolute path. No other user may write the files in a
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
                return f"another user may have written {folder}"
        inside = mendable(run, open_above(run))
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return f"others may rename folders in {inside[0]}" if inside else None
