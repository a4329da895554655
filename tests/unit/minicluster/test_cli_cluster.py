"""`bsl cluster` on a machine that cannot start one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.cli.main import bsl
from tests.support.texts import has_parts


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path_factory.mktemp("c"))
    monkeypatch.setattr("bigsci_launch.minicluster.directory.MAX_PATH_LENGTH", 200)
    monkeypatch.setenv("BSL_CLUSTER_DIR", "cluster")
    return Path.cwd() / "cluster"


def run(*argv: str) -> Result:
    return CliRunner().invoke(bsl, ["cluster", *argv])


def test_isolation_without_root_is_refused_before_anything_is_made(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = run("up", "--nodes", "2", "--isolated")
    assert (result.exit_code, " root " in result.stderr) == (3, True)
    assert not here.exists()


def test_missing_packages_are_named_before_anything_is_made(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("bigsci_launch.minicluster.daemons.SYSTEM_PATH", "/nowhere")
    result = run("up", "--nodes", "2")
    assert result.exit_code == 3
    assert has_parts(result.stderr, "munged", "slurmctld", "slurmd", "sinfo")
    assert not here.exists()


@pytest.mark.parametrize("argv", [("--nodes", "0"), ("--nodes", "201"), ("--nodes", "2", "--gpus-per-node", "65"), ()])
def test_impossible_sizes_are_usage_errors(here: Path, argv: tuple[str, ...]):
    assert run("up", *argv).exit_code == 2


def test_without_a_cluster_there_is_nothing_to_stop_and_nothing_to_show(here: Path):
    down = run("down")
    assert (down.exit_code, down.stdout, down.stderr) == (0, "", f"no cluster in {here}: nothing to do\n")
    status = run("status")
    assert (status.exit_code, status.stdout) == (1, f"no cluster in {here}\n")
    killed = run("kill-node", "n0")
    assert (killed.exit_code, str(here) in killed.stderr, "bsl cluster up" in killed.stderr) == (3, True, True)
    assert not here.exists()


def test_status_without_a_cluster_is_a_document_too(here: Path):
    assert json.loads(run("status", "--json").stdout) == {
        "schema_version": 1,
        "directory": str(here),
        "problem": f"no cluster in {here}",
        "slurm_conf": None,
        "isolated": None,
        "gpus_per_node": None,
        "nodes": [],
    }


def test_half_a_cluster_is_called_so_and_removed(here: Path):
    here.mkdir()
    (here / "processes.jsonl").touch()
    (here / "cluster.json").write_text('{"shape": {"num_')
    status = run("status")
    assert (status.exit_code, status.stdout) == (1, f"the cluster in {here} never started completely\n")
    down = run("down")
    assert (down.exit_code, str(here) in down.stderr) == (0, True)
    assert not here.exists()


def test_somebody_elses_directory_is_left_alone(here: Path):
    here.mkdir()
    (here / "thesis.tex").write_text("x")
    down = run("down")
    assert down.exit_code == 3
    assert "nothing was removed" in down.stderr
    assert (here / "thesis.tex").exists()
