"""A disk that refuses a save ends no rank: the state is in memory, and the save is tried again."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.checkpoints.folder import CheckpointsDir, read_record, require_complete
from bigsci_launch.checkpoints.refused_saves import read_refused_saves
from bigsci_launch.runs.layout import RunDir

from .conftest import Attempt, Start, losses

pytestmark = pytest.mark.torch
SLOW = {"kind": "slow", "rank": 1, "step": 1, "seconds": 0.15}
RUN: dict[str, Any] = {"training": {"steps": 20}, "checkpoint": {"save_interval": 10}, "faults": [SLOW]}
HASTY = "hasty"


def limit_files(attempt: Attempt, rank: int, size: int) -> None:
    """Let the kernel refuse a rank to make files larger than `size`."""
    resource.prlimit(attempt.processes[rank].pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.fixture(scope="module")
def undisturbed(finish: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return losses(finish(tmp_path_factory.mktemp("undisturbed"), "dp=2", **{**RUN, "faults": []}))


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """The checkpoints of a run on a file system of their own, with no room left but for a few small files."""
    folder = RunDir(tmp_path / "run").checkpoints
    folder.mkdir(parents=True)
    made = ["mount", "-t", "tmpfs", "-o", "size=16m", "bsl-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(made, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    disk = os.statvfs(folder)
    (folder / "ballast").write_bytes(bytes((disk.f_bavail - 4) * disk.f_frsize))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_costs_no_step(start: Start, full: Path, undisturbed: dict[int, str]) -> None:
    attempt = start(full.parent, "dp=2", module=HASTY, **RUN)
    attempt.until(lambda: bool(attempt.events(0, "save_refused")))
    found = read_refused_saves(attempt.folder)
    assert found is not None
    assert (found.since, found.newest, found.errno, found.ranks[0]) == (10, None, "ENOSPC", 0)
    assert [path.name for path in full.iterdir()] == ["ballast"]
    (full / "ballast").unlink()
    assert attempt.wait() == [0, 0], attempt.logs()
    assert losses(attempt) == undisturbed
    saves = attempt.events(0, "save")
    assert 10 < saves[0]["step"] < 20 and saves[0]["refused_since"] == 10
    assert [each["step"] for each in saves] == [each["step"] for each in attempt.events(1, "save")]
    assert read_refused_saves(attempt.folder) is None and not attempt.events(1, "save_refused")
    latest = full / CheckpointsDir(full).read_latest()
    require_complete(latest, read_record(latest))


@pytest.mark.parametrize("background", [False, True])
def test_the_disk_of_one_rank_stops_no_rank(
    start: Start, tmp_path: Path, undisturbed: dict[int, str], background: bool
) -> None:
    saves = {"save_interval": 5, "background": background}
    attempt = start(tmp_path, "dp=2", module=HASTY, **{**RUN, "checkpoint": saves})
    attempt.until(lambda: bool(attempt.events(1, "save")))
    limit_files(attempt, 1, 60_000)
    attempt.until(lambda: bool(attempt.events(0, "save_refused")))
    refused = attempt.events(0, "save_refused")[0]
    assert (refused["ranks"], refused["newest"], refused["errno"]) == ([1], 5, "EFBIG")
    assert CheckpointsDir(attempt.run.checkpoints).read_latest() == "global_step5"
    limit_files(attempt, 1, resource.RLIM_INFINITY)
    assert attempt.wait() == [0, 0], attempt.logs()
    assert losses(attempt) == undisturbed
    assert CheckpointsDir(attempt.run.checkpoints).read_latest() == "global_step20"


def test_a_last_save_without_room_is_tried_again_until_the_run_must_stop(start: Start, tmp_path: Path) -> None:
    attempt = start(tmp_path, "dp=2", module=HASTY, **{**RUN, "checkpoint": {}})
    attempt.until(lambda: bool(attempt.steps()))
    limit_files(attempt, 1, 60_000)
    attempt.until(lambda: len(attempt.events(0, "save_refused")) > 5)
    os.kill(attempt.processes[0].pid, signal.SIGUSR2)
    assert attempt.wait() == [4, 4], attempt.logs()
    errors = [attempt.error(rank) or {} for rank in range(2)]
    assert [(error["type"], error["step"]) for error in errors] == [("SaveError", 20)] * 2
    assert not CheckpointsDir(attempt.run.checkpoints).tags()
