"""What a rank says when the disk refuses its part of a checkpoint."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.checkpoints.folder import CheckpointsDir
from bigsci_launch.errors import SaveError
from tests.support.texts import has_parts

pytestmark = pytest.mark.torch


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", "size=1m", "bsl-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(made, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def save() -> Callable[[Path, int], None]:
    import torch

    from bigsci_launch.train.state.durable import DurableCheckpointEngine

    return lambda path, size: DurableCheckpointEngine().save({"x": torch.zeros(size)}, str(path))


def test_a_full_disk_is_one_sentence(disk: Path, save: Any) -> None:
    with pytest.raises(SaveError) as refused:
        save(disk / "mp_rank_00_model_states.pt", 1 << 20)
    assert has_parts(refused.value.message, f"{disk}/mp_rank_00_model_states.pt: ", "ENOSPC")
    assert refused.value.hint


def test_a_disk_that_is_read_only_is_one_sentence(disk: Path, save: Any) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(SaveError) as refused:
        save(disk / "x.pt", 8)
    assert refused.value.message == f"{disk}/x.pt: Read-only file system (EROFS)"


@pytest.mark.parametrize(("number", "hint"), [(errno.EIO, "administrators"), (errno.EDQUOT, "quota")])
def test_what_the_sync_finds_is_one_sentence(
    tmp_path: Path, save: Any, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(SaveError) as refused:
        save(tmp_path / "x.pt", 8)
    name = errno.errorcode[number]
    assert refused.value.message == f"{tmp_path}/x.pt: {os.strerror(number)} ({name})"
    assert hint in (refused.value.hint or "")


def test_a_process_without_free_descriptors_is_no_refusal_of_the_disk(tmp_path: Path, save: Any) -> None:
    """Another process of this rank could save: the error ends it as any other does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(OSError) as failed:
            save(tmp_path / "x.pt", 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failed.value.errno == errno.EMFILE


@pytest.mark.parametrize(
    ("latest", "step", "lost"),
    [(None, 0, ["1", "8"]), ("global_step7", 7, ["8"]), ("../elsewhere", None, []), ("odd", None, [])],
)
def test_no_checkpoint_is_told_from_one_that_is_not_known(
    tmp_path: Path, latest: str | None, step: int | None, lost: list[str]
) -> None:
    from bigsci_launch.train.state.saves import find_newest

    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    found = find_newest(CheckpointsDir(tmp_path))
    assert (found.step, re.findall(r"\d+", found.lost_text(8))) == (step, lost)
