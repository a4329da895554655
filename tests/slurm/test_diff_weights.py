"""`bsl diff-weights --slurm` on a real Slurm: the answer, the exit code and the end of the job."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]
SIDES = {"a": b"\0\0\x80?", "same": b"\0\0\x80?", "b": b"\0\0\0@"}
SLEEPER = """
import sys
from bigsci_launch.scheduler.slurm import run_on_node
run_on_node(["sleep", "300"], name="sleeper", options={}, answers=(0, 1), on_line=lambda line: None)
"""


@pytest.fixture
def folder(short_tmp_path: Path) -> Path:
    """Three small files; `same` equals `a`, and `b` has another value."""
    for name, data in SIDES.items():
        header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (short_tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    return short_tmp_path


def started(cluster: Any, code: str) -> subprocess.Popen[str]:
    """Start a program and wait until its job runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=cluster.environment(), stderr=subprocess.PIPE, text=True
    )
    for _ in range(300):
        if cluster.run("squeue", "-h", "-t", "R", "-n", "sleeper", "-o", "%i").stdout.strip():
            return process
        time.sleep(0.1)
    process.kill()
    raise AssertionError(process.communicate())


def test_the_answer_is_that_of_a_call_without_slurm(isolated_cluster: Any, folder: Path) -> None:
    cluster = isolated_cluster
    for other, code in (("same", 0), ("b", 1)):
        sides = [str(folder / f"{name}.safetensors") for name in ("a", other)]
        here = cluster.bsl("diff-weights", *sides, "--json")
        there = cluster.bsl("diff-weights", *sides, "--json", "--slurm", "--site", "minicluster")
        assert (there.returncode, there.stderr) == (code, "")
        assert there.stdout == here.stdout
    nothing = cluster.bsl("diff-weights", str(folder / "a.safetensors"), str(folder / "nothing"), "--slurm")
    assert (nothing.returncode, nothing.stdout) == (4, "")
    assert nothing.stderr == f"error: {folder / 'nothing'}: no such file or folder\n"


def test_what_slurm_refuses_or_ends_is_no_answer(isolated_cluster: Any, folder: Path) -> None:
    """srun exits with 1 for its own errors, which would mean that the sides differ."""
    site = folder / "site.yaml"
    partition = "partitions: {gone: {}}\ndefault_partition: gone\n"
    site.write_text(f"description: a site\nscheduler: slurm\nranks_per_node: 1\n{partition}")
    sides = [str(folder / "a.safetensors"), str(folder / "same.safetensors")]
    refused = isolated_cluster.bsl("diff-weights", *sides, "--slurm", "--site", str(site))
    assert refused.returncode == 3
    assert "srun: Slurm refused: invalid partition specified: gone" in refused.stderr
    process = started(isolated_cluster, SLEEPER)
    isolated_cluster.run("scancel", "-n", "sleeper")
    _, words = process.communicate(timeout=60)
    assert "SlurmError: srun: sleeper was ended before it had an answer" in words


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_ends_the_job(isolated_cluster: Any, number: signal.Signals) -> None:
    interrupts = (
        "import signal\n"
        "from bigsci_launch.launch.foreground import interrupts_on\n"
        "with interrupts_on(signal.SIGTERM):\n"
    )
    indented = "".join(f"    {line}\n" for line in SLEEPER.strip().splitlines())
    process = started(isolated_cluster, interrupts + indented)
    process.send_signal(number)
    process.communicate(timeout=60)
    for _ in range(100):
        if not isolated_cluster.run("squeue", "-h", "-n", "sleeper").stdout.strip():
            return
        time.sleep(0.1)
    raise AssertionError("the job still runs")
