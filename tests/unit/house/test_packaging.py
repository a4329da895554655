"""Content reaches the package in wheel, sdist and editable installs alike."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bigsci_launch.cli.main import bsl
from bigsci_launch.errors import INSTALL_MCP, INSTALL_OTLP, INSTALL_TRAIN, INSTALL_WEIGHTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PROBE = """
from importlib.resources import files
import bigsci_launch
from bigsci_launch.config.site import list_sites
assets = files("bigsci_launch") / "assets"
print(bigsci_launch.__file__)
content = ("configs/demo.yaml", "slurm/templates/slurm.sbatch.j2", "slurm/sites/local.yaml", "slurm/hardware/gpus.yaml")
for path in content:
    assert (assets / path).read_text(), path
assert list_sites()
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return folder


def import_from(folder: Path, cwd: Path) -> Path:
    """Return where `bigsci_launch` comes from if `folder` is first on the path. Reads its content too."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture
def wheel(distributions: Path, tmp_path: Path) -> Path:
    """A wheel as pip unpacks it."""
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as archive:
        archive.extractall(tmp_path / "wheel")
    return tmp_path / "wheel"


@pytest.fixture
def sdist(distributions: Path, tmp_path: Path) -> Path:
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data") if sys.version_info >= (3, 12) else archive.extractall(tmp_path)
    return next(tmp_path.glob("bigsci_launch-*"))


def test_a_wheel_holds_the_content(wheel: Path, tmp_path: Path) -> None:
    assert import_from(wheel, tmp_path).is_relative_to(wheel)
    assert sorted(path.suffix or path.name for path in wheel.iterdir()) == [".data", ".dist-info", "bigsci_launch"]


def test_an_sdist_holds_the_content(sdist: Path, tmp_path: Path) -> None:
    assert import_from(sdist, tmp_path).is_relative_to(sdist)


def test_a_wheel_has_a_man_page_for_each_command(wheel: Path) -> None:
    [folder] = wheel.glob("*.data/data/share/man/man1")
    named = {f"bsl-{name}.1" for name, command in bsl.commands.items() if not command.hidden}
    assert {path.name for path in folder.iterdir()} == {"bsl.1", *named}


def files_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def test_a_wheel_has_known_hangs_without_their_recordings(wheel: Path, sdist: Path) -> None:
    """Only tests read recordings; whoever builds from the sdist can run those."""
    signatures = "bigsci_launch/assets/diagnostics/signatures"
    here = files_below(ROOT / "diagnostics" / "signatures")
    assert files_below(sdist / signatures) == here
    assert files_below(wheel / signatures) == {path for path in here if "recording" not in path.parts}


def test_wheel_and_sdist_have_what_is_known_of_frames(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    known = "bigsci_launch/assets/diagnostics/known"
    here = files_below(ROOT / "diagnostics" / "known")
    assert here == files_below(wheel / known) == files_below(sdist / known)
    probe = "from bigsci_launch.spy.evidence import known_code as k; print(len(k._CODE.files), k.PROBLEMS)"
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == (f"{len(here)} ()\n", "")


def test_an_installed_wheel_reads_the_library(wheel: Path, tmp_path: Path) -> None:
    recording = ROOT / "diagnostics" / "signatures" / "stale-build-lock" / "recording"
    command = [sys.executable, "-m", "bigsci_launch", "spy", "--bundle", str(recording), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (json.loads(done.stdout)["verdict"]["signature"], done.stderr) == ("stale-build-lock", "")


def test_an_editable_install_holds_the_content(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [INSTALL_TRAIN, INSTALL_WEIGHTS, INSTALL_MCP, INSTALL_OTLP])
def test_the_extra_that_an_error_names_exists(command: str) -> None:
    [extra] = re.findall(r"'\.\[([a-z]+)\]'", command)
    assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
