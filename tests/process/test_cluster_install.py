"""slurm/minicluster/install.sh where it may not install anything, and the shell code next to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MINICLUSTER = Path(__file__).parents[2] / "slurm" / "minicluster"


@pytest.fixture
def poor_path(tmp_path: Path) -> str:
    """A PATH with only bash and id: no Slurm and no apt-get."""
    for name in ("bash", "id"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    return str(tmp_path)


def run(path: str) -> subprocess.CompletedProcess[str]:
    install = str(MINICLUSTER / "install.sh")
    return subprocess.run(["bash", install], env={"PATH": path}, capture_output=True, text=True, timeout=30)


def test_where_nothing_may_be_installed_it_says_why(poor_path: str) -> None:
    done = run(poor_path)
    assert done.returncode == 1
    assert "This script can only use apt-get, which is not on this machine." in done.stderr
    assert "by hand: apt-get install slurm-wlm munge" in done.stderr


def test_an_ordinary_user_without_sudo_is_told_so(poor_path: str) -> None:
    (Path(poor_path) / "apt-get").symlink_to("/bin/false")
    (Path(poor_path) / "id").unlink()
    (Path(poor_path) / "id").write_text("#!/bin/sh\necho 1000\n")
    (Path(poor_path) / "id").chmod(0o755)
    done = run(poor_path)
    assert done.returncode == 1
    assert "You are not root, and sudo does not work without a password." in done.stderr


def test_where_all_is_installed_it_is_silent(tmp_path: Path) -> None:
    for name in ("sbatch", "slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare", "shellcheck"):
        (tmp_path / name).symlink_to("/bin/true")
    done = run(f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("script", sorted(MINICLUSTER.glob("*.sh")), ids=lambda script: script.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
