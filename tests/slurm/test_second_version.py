"""What reads Slurm's words, on a second version of Slurm: some tests of this folder, run where that one is installed.

`make slurm-matrix VERSION=...` runs all of them, on each version that is known.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm
PROJECT = Path(__file__).parents[2]
VERSION = "24.11"
INSTALL_S, RUN_S = 60, 600
READERS = (
    "test_status.py::test_a_waiting_job_says_why_and_what_to_do",
    "test_submit.py::test_a_run_from_submission_to_its_end",
    "test_submit.py::test_a_killed_rank_makes_the_job_fail_and_is_named",
    "test_spy_jobs.py::test_a_heterogeneous_job_is_looked_at_as_a_whole",
    "test_watch.py::test_a_job_of_somebody_else_is_watched_by_its_log",
)
"""squeue, scontrol, sinfo and srun's last words; whole jobs, and jobs with several parts."""


def with_slurm(*words: str, limit_s: int) -> subprocess.CompletedProcess[str]:
    script = ["bash", "slurm/minicluster/with-slurm.sh", VERSION, *words]
    limited = ["timeout", "--kill-after=5", str(limit_s), *script]
    return subprocess.run(limited, cwd=PROJECT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def second_slurm() -> None:
    """Install it, if it is not here from another run of the tests. `make test` begins with that, in the background."""
    done = with_slurm("--make", limit_s=INSTALL_S)
    if done.returncode == 124:
        pytest.skip(f"Slurm {VERSION} is not in the cache yet, and {INSTALL_S} s were too short to install it")
    if done.returncode:
        *_, why = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        pytest.skip(why)


def test_what_reads_slurm_reads_another_version_too(second_slurm: None) -> None:
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = with_slurm(sys.executable, *options, *(f"tests/slurm/{name}" for name in READERS), limit_s=RUN_S)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"{len(READERS)} passed" in done.stdout, done.stdout[-2000:]
