"""A submission that a full disk refuses leaves nothing behind, wherever the disk became full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import fill

MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}
BLOCK = 4096


def write_run_file(folder: Path, disk: Path) -> Path:
    config = {
        "run": {"name": "trial", "root": str(disk / "runs" / "mine"), "command": ["true"]},
        "slurm": {"site": "local"},
        "parallelism": {"data_parallel_size": 2},
        "model": MODEL,
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 2},
        "data": {"prefix": "none"},
    }
    path = folder / "trial.yaml"
    path.write_text(json.dumps(config))
    return path


def submit(path: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bigsci_launch", "submit", str(path), "--detach"]
    return subprocess.run(argv, cwd=path.parent, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("num_free_blocks", [0, 1, 4, 12])
def test_a_submission_on_a_full_disk_leaves_nothing(small_disk: Path, tmp_path: Path, num_free_blocks: int) -> None:
    path = write_run_file(tmp_path, small_disk)
    fill(small_disk)
    before = sorted(small_disk.iterdir())
    with (small_disk / "ballast").open("rb+") as ballast:
        ballast.truncate(max(0, os.fstat(ballast.fileno()).st_size - num_free_blocks * BLOCK))
    done = submit(path)
    assert done.returncode == 2, done.stderr
    assert (
        "No space left on device" in done.stderr and "hint: make room, or set run.root to another folder" in done.stderr
    )
    assert sorted(small_disk.iterdir()) == before
