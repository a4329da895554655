"""Who may rename above a run, as far as no run is needed to ask."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from bigsci_launch import own_place


def nfs4_acl(*names: str) -> bytes:
    """Return what NFSv4 shows as the list of a file: entries of type, flags, mask and name."""
    entries = (struct.pack(">4I", 0, 0, 0x1601FF, len(name)) + name.encode() for name in names)
    padded = (entry + b"\0" * (-len(entry) % 4) for entry in entries)
    return struct.pack(">I", len(names)) + b"".join(padded)


@pytest.mark.parametrize(
    ("entries", "names_others"),
    [
        (nfs4_acl("OWNER@", "GROUP@", "EVERYONE@"), False),
        (nfs4_acl("OWNER@", "eve@lab.example", "GROUP@", "EVERYONE@"), True),
        (nfs4_acl("OWNER@", "64102"), True),
        (nfs4_acl("OWNER@", "GROUP@")[:-4], True),
        (b"\xff\xff\xff\xff", True),
    ],
    ids=["nobody", "colleague", "number", "torn", "damaged"],
)
def test_every_file_on_nfs4_has_a_list_and_only_some_name_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: bytes, names_others: bool
) -> None:
    tmp_path.chmod(0o770)
    monkeypatch.setattr(own_place, "_is_own_group", lambda _: True)
    assert not own_place.others_may_rename(tmp_path, tmp_path.stat())

    def getxattr(_path: Path, name: str) -> bytes:
        if name == "system.nfs4_acl":
            return entries
        raise OSError("Operation not supported")

    monkeypatch.setattr(os, "getxattr", getxattr)
    assert own_place.others_may_rename(tmp_path, tmp_path.stat()) is names_others
