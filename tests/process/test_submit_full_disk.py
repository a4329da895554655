"""A submission that a full disk refuses leaves nothing behind, wherever the disk became full."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from bigsci_launch.launch.foreground import Ending
from tests.support.command import run_bsl
from tests.support.texts import has_parts

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


def run_here(path: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Submit a run of this shell program, and wait for its end."""
    document = json.loads(path.read_text())
    document["run"]["command"] = ["/bin/sh", "-c", program]
    path.write_text(json.dumps({**document, "monitor": {"watch": "off"}}))
    return run_bsl(path.parent, "submit", str(path), rc=None)


def test_an_end_that_only_the_output_records_is_said(small_disk: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    done = run_here(write_run_file(tmp_path, small_disk), f"cat /dev/zero >> {small_disk}/ballast; exit 0")
    record = small_disk / "runs" / "mine" / "trial" / "attempts" / "0001" / "exit.json"
    assert (done.returncode, record.exists()) == (0, False)
    assert has_parts(done.stderr, record)


def test_an_end_that_nothing_records_is_said_and_is_no_success(tmp_path: Path) -> None:
    kill_the_launcher = "read _ _ _ launcher _ </proc/$PPID/stat; kill -9 $launcher"
    done = run_here(write_run_file(tmp_path, tmp_path), kill_the_launcher)
    record = tmp_path / "runs" / "mine" / "trial" / "attempts" / "0001" / "exit.json"
    assert (done.returncode, record.exists()) == (137, False)
    assert has_parts(done.stderr, record)
    assert [Ending(code, False).status(is_known=False) for code in (0, 3)] == [4, 3]


def submit(path: Path) -> subprocess.CompletedProcess[str]:
    return run_bsl(path.parent, "submit", str(path), "--detach", rc=None)


@pytest.mark.parametrize("num_free_blocks", [0, 1, 4, 12])
def test_a_submission_on_a_full_disk_leaves_nothing(small_disk: Path, tmp_path: Path, num_free_blocks: int) -> None:
    path = write_run_file(tmp_path, small_disk)
    fill(small_disk)
    before = sorted(small_disk.iterdir())
    with (small_disk / "ballast").open("rb+") as ballast:
        ballast.truncate(max(0, os.fstat(ballast.fileno()).st_size - num_free_blocks * BLOCK))
    done = submit(path)
    assert done.returncode == 2, done.stderr
    assert has_parts(done.stderr, "No space left", "hint: ", "run.root")
    assert sorted(small_disk.iterdir()) == before
