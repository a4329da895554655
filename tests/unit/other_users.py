"""Two people of one project, as which root can act. Nothing in the system knows them but their numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ALICE, MALLORY, PROJECT = 64_101, 64_102, 64_100
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


@contextmanager
def acting_as(user: int, mask: int = 0o022) -> Iterator[None]:
    """Act as a user whose own group has the same number, and who is a member of the project."""
    groups, before = os.getgroups(), os.umask(mask)
    os.setgroups([PROJECT])
    os.setegid(user)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        os.umask(before)


def make_shared(folder: Path, mode: int = 0o2775) -> Path:
    """Make a folder of ALICE in which the project may write, and let others come to it."""
    for above in folder.parents:
        if above.stat().st_mode & 0o001 == 0:
            above.chmod(above.stat().st_mode | 0o011)
    folder.mkdir()
    os.chown(folder, ALICE, PROJECT)
    folder.chmod(mode)
    return folder
