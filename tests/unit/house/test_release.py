"""What a release has apart from the pure wheel: the wheel with the C part, `bsl.pyz`, the SBOM."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
RECORDING = "diagnostics/signatures/stale-build-lock/recording"
PYTHONS = [sys.executable, *filter(None, (shutil.which(f"python3.{minor}") for minor in range(9, 15)))]
LOADS = "import calls_build; print(calls_build.load_native('/nowhere').__file__)"


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pyz") / "bsl.pyz"
    subprocess.run([sys.executable, "release/build_pyz.py", file], cwd=ROOT, check=True, timeout=300)
    return file


def run(pyz: Path, *words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run the file with nothing but the standard library, and a cache of its own."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(pyz.parent)}
    argv = [python, "-S", pyz, *words]
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("python", PYTHONS)
def test_one_file_gives_the_verdict_of_the_installed_command(pyz: Path, python: str) -> None:
    if subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip("it is a link to no Python")
    words = ["spy", "--bundle", RECORDING, "--json"]
    done = run(pyz, *words, python=python)
    whole = subprocess.run([Path(sys.executable).with_name("bsl"), *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.stderr, json.loads(done.stdout)) == ("", json.loads(whole.stdout))


def test_each_command_of_the_file_starts(pyz: Path, tmp_path: Path) -> None:
    log = tmp_path / "job.out"
    log.write_text("srun: error: n1: task 3: Out Of Memory\n")
    assert run(pyz, "why", str(log)).returncode == 0
    assert "not a run" in run(pyz, "slow", str(tmp_path)).stderr
    assert run(pyz, "diff-weights", "README.md", "LICENSE").returncode == 4


def test_the_file_says_what_it_does_not_have(pyz: Path) -> None:
    done = run(pyz, "plan", "configs/demo.yaml")
    assert (done.returncode, done.stdout) == (1, "") and "diff-weights, slow, spy, why" in done.stderr


def test_the_file_runs_nothing_that_others_may_write(pyz: Path) -> None:
    assert run(pyz, "--version").returncode == 0
    [folder] = (pyz.parent / ".cache" / "bsl").glob("pyz-*")
    folder.chmod(0o777)
    done = run(pyz, "--version")
    folder.chmod(0o755)
    assert (done.returncode, done.stdout) == (2, "") and str(folder) in done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_native_wheel_needs_no_compiler(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "BSL_NATIVE": "1"}, check=True, capture_output=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    assert f"-cp3{sys.version_info.minor}-" in wheel.name and "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    folder = tmp_path / "wheel" / "bigsci_launch" / "assets" / "diagnostics"
    environment = {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LOADS], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert Path(done.stdout.strip()).parent == folder, done.stderr


def test_the_sbom_names_what_a_base_installation_brings() -> None:
    sys.path.insert(0, str(ROOT / "release"))
    document = importlib.import_module("release").sbom()
    sys.path.pop(0)
    names = {each["name"] for each in document["components"]}
    assert {"click", "rich", "pyyaml", "jinja2", "pydantic", "pydantic_core", "py-spy"} - names <= {"pydantic_core"}
    assert not names & {"torch", "deepspeed", "mcp"}
    assert document["bomFormat"] == "CycloneDX"
