"""Nobody else uses the cluster of an ordinary user: with real users, a real Slurm, and a stranger who tries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm
OWNER, STRANGER = 1, 65534
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(slurm_packages: None) -> Iterator[Path]:
    """A folder of OWNER which others may cross, with a path that is short enough for sockets."""
    made = Path(tempfile.mkdtemp(prefix="bsl-", dir="/tmp"))
    made.chmod(0o711)
    os.chown(made, OWNER, OWNER)
    yield made
    shutil.rmtree(made)


def run_as(user: int, directory: Path, *argv: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    packages = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    environment = {"BSL_CLUSTER_DIR": str(directory), "SLURM_CONF": str(directory / "slurm.conf")}
    return subprocess.run(
        ["timeout", str(timeout_s), *argv],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        user=user, group=user, extra_groups=[], cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_stranger_runs_nothing_in_it_even_if_its_folder_was_opened(folder: Path) -> None:
    python = shutil.which("python3", path="/usr/bin")
    if python is None or run_as(OWNER, folder, python, "-m", "bigsci_launch", "--version").returncode:
        pytest.skip("needs a Python, and this package, that everybody may read")
    cluster = folder / "c"
    bsl = (python, "-m", "bigsci_launch", "cluster")
    up = run_as(OWNER, cluster, *bsl, "up", "--nodes", "1")
    assert up.returncode == 0, up.stderr
    try:
        assert cluster.stat().st_mode & 0o777 == 0o700
        assert run_as(OWNER, cluster, "srun", "-N1", "id", "-u").stdout == f"{OWNER}\n"
        closed = run_as(STRANGER, cluster, "srun", "-N1", "id", "-u", timeout_s=2)
        assert "slurm.conf: Permission denied" in closed.stderr and not closed.stdout
        cluster.chmod(0o755)
        for path in cluster.glob("*.conf"):
            path.chmod(0o644)
        opened = run_as(STRANGER, cluster, "srun", "-N1", "id", "-u", timeout_s=3)
        assert "authentication error" in opened.stderr and not opened.stdout
    finally:
        down = run_as(OWNER, cluster, *bsl, "down")
    assert down.returncode == 0, down.stderr
