"""The first screen of the README is what `bsl spy --jobid` prints about a plain Slurm job that nobody prepared."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from bigsci_launch.spy.judge.conclusion import GracePeriod
from tests.support.waiting import wait_until

from .conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

README = Path(__file__).parents[2] / "README.md"
PROGRAM = Path(__file__).parent / "programs" / "plain_training.py"
SCRIPT = f"""#!/bin/bash
export MASTER_ADDR=$(hostname) MASTER_PORT=29417 OMP_NUM_THREADS=1
srun {sys.executable} {PROGRAM} {{folder}} 5
"""
# The seven others compute a batch and reach their all_reduce; then the worker must have slept for long enough.
STILL_S = (GracePeriod.LOCAL.asleep_s or 0.0) + 7.0


def test_a_plain_job_with_a_locked_data_loader_worker(isolated_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT.format(folder=tmp_path))
    job = isolated_cluster.run(
        "sbatch", "--parsable", "-N4", "--ntasks-per-node=2", f"--output={tmp_path}/out", str(script)
    ).stdout.strip()
    try:
        wait_until_it_hangs(tmp_path)
        said = isolated_cluster.bsl("spy", "--jobid", job, "--topology", "dp=8", "--output", str(tmp_path / "evidence"))
    finally:
        isolated_cluster.run("scancel", job)
    printed = without_numbers(said.stdout)
    for piece in promised():
        assert without_numbers(piece) in printed, said.stdout + said.stderr


def wait_until_it_hangs(folder: Path) -> None:
    wait_until(lambda: len(list(folder.glob("ready-*"))) == 8, 240, evidence=(folder / "out").read_text)
    time.sleep(STILL_S)


def promised() -> list[str]:
    """The pieces of the README's first block between its `...`."""
    command, _, answer = README.read_text().split("```")[1].partition("\n")[2].partition("\n")
    assert command.startswith("$ bsl spy --jobid")
    return [piece for piece in answer.split("...") if piece.strip()]


def without_numbers(text: str) -> str:
    """On one line, with every number that depends on the machine as N: process ids, line numbers, the job's id; and the
    confidence, which is fitted."""
    numbers = r"(?<=child process )\d+|(?<=job )\d+|(?<=py:)\d+|(?<=--pid )\d+|(?<=confidence )[\d.]+"
    return re.sub(numbers, "N", " ".join(text.split()))
