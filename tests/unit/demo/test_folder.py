"""`bsl demo` deletes the runs of an earlier demonstration, and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.demo.folder import HANGS, MARKER, RUNS, prepare_folder
from bigsci_launch.errors import BslError


def make_run(folder: Path, name: str) -> Path:
    checkpoint = folder / "runs" / name / "checkpoints" / "global_step1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_text("precious")
    return folder / "runs" / name


def test_a_project_with_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs = [make_run(tmp_path, name) for name in ("precious", *RUNS)]
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(bsl, ["demo", "--folder", "."])
    assert said.exit_code == 1
    assert all((run / "checkpoints" / "global_step1" / "weights").exists() for run in runs)
    assert not (tmp_path / MARKER).exists()


def test_in_its_own_folder_only_the_runs_that_it_made_are_deleted(tmp_path: Path):
    prepare_folder(tmp_path / "demo")
    theirs = make_run(tmp_path / "demo", "precious")
    for name in RUNS[:2]:
        make_run(tmp_path / "demo", name)
    archived = make_run(tmp_path / "archive", HANGS)
    (tmp_path / "demo" / "runs" / HANGS).symlink_to(archived)
    prepare_folder(tmp_path / "demo")
    assert [run.name for run in (tmp_path / "demo" / "runs").iterdir()] == ["precious"]
    assert (theirs / "checkpoints").exists() and (archived / "checkpoints" / "global_step1" / "weights").exists()


def test_a_linked_folder_of_runs_is_refused(tmp_path: Path):
    prepare_folder(tmp_path / "demo")
    run = make_run(tmp_path / "work", HANGS)
    (tmp_path / "demo" / "runs").symlink_to(tmp_path / "work" / "runs")
    with pytest.raises(BslError, match="`runs`"):
        prepare_folder(tmp_path / "demo")
    assert run.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a file of another user")
def test_the_demonstration_of_somebody_else_is_refused(tmp_path: Path):
    prepare_folder(tmp_path)
    run = make_run(tmp_path, HANGS)
    os.chown(tmp_path / MARKER, 65534, -1)
    with pytest.raises(BslError, match="uid 65534"):
        prepare_folder(tmp_path)
    assert run.exists()


def test_make_clean_leaves_runs():
    root = Path(__file__).resolve().parents[3]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    said = subprocess.run(
        ["make", "-n", "clean"], cwd=root, env=alone, capture_output=True, text=True, check=True
    ).stdout
    assert said.split()[:2] == ["rm", "-rf"] and "runs" not in said.split()
