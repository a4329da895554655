"""Content reaches the package in wheel, sdist and editable installs alike."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROBE = """
from importlib.resources import files
import bigsci_launch
from bigsci_launch.config.site import list_sites
assets = files("bigsci_launch") / "assets"
print(bigsci_launch.__file__)
content = ("configs/demo.yaml", "slurm/templates/slurm.sbatch.j2", "slurm/sites/local.yaml")
for path in content:
    assert (assets / path).read_text(), path
assert list_sites()
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return folder


def import_from(folder: Path, cwd: Path) -> Path:
    """Where `bigsci_launch` comes from when `folder` is first on the path; its content is read too."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_a_wheel_holds_the_content(distributions: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "wheel")
    assert import_from(tmp_path / "wheel", tmp_path).is_relative_to(tmp_path / "wheel")
    assert sorted(path.name for path in (tmp_path / "wheel").iterdir() if path.suffix != ".dist-info") == [
        "bigsci_launch"
    ]


def test_an_sdist_holds_the_content(distributions: Path, tmp_path: Path) -> None:
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as sdist:
        sdist.extractall(tmp_path, filter="data") if sys.version_info >= (3, 12) else sdist.extractall(tmp_path)
    unpacked = next(path for path in tmp_path.iterdir() if path.is_dir())
    assert import_from(unpacked, tmp_path).is_relative_to(unpacked)


def test_an_editable_install_holds_the_content(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
