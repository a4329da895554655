"""A site file next to the run file that replaces a packaged one is said, and refused where others may write it."""

from __future__ import annotations

import getpass
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.cli.main import bsl
from tests.support.texts import has_parts

LOCAL = "description: mine\nscheduler: local\nranks_per_node: 2\nactivation: [echo mine]\n"
NOBODY = 65534


def check(folder: Path) -> Result:
    return CliRunner().invoke(bsl, ["config", "check", str(folder / "run.yaml")])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = {"run": {"name": "trial", "command": ["true"]}, "slurm": {"site": "local"}}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    (tmp_path / "sites").mkdir(mode=0o755)
    (tmp_path / "sites" / "local.yaml").write_text(LOCAL)
    (tmp_path / "sites" / "local.yaml").chmod(0o644)
    (tmp_path / "sites").chmod(0o755)
    return tmp_path


def test_a_site_that_replaces_a_packaged_one_is_said(folder: Path) -> None:
    done = check(folder)
    named = (f"site local is from {folder / 'sites' / 'local.yaml'}", f"owner {getpass.getuser()}")
    assert done.exit_code == 0 and has_parts(done.output, *named)
    (folder / "sites" / "local.yaml").rename(folder / "sites" / "pond.yaml")
    assert "owner" not in check(folder).output


@pytest.mark.parametrize(("part", "mode"), [("sites/local.yaml", 0o664), ("sites", 0o2775), ("sites", 0o777)])
def test_it_is_refused_where_others_may_write(folder: Path, part: str, mode: int) -> None:
    (folder / part).chmod(mode)
    done = check(folder)
    assert done.exit_code == 2 and f"may write to {folder / part}" in done.output
    run = json.loads((folder / "run.yaml").read_text())
    run["slurm"]["site"] = "sites/local.yaml"
    (folder / "run.yaml").write_text(json.dumps(run))
    assert check(folder).exit_code == 0, "the user has typed the path"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a file of another user")
def test_it_is_refused_if_it_is_somebody_elses_unless_the_run_file_is_theirs_too(folder: Path) -> None:
    for part in ("sites", "sites/local.yaml"):
        os.chown(folder / part, NOBODY, -1)
    assert check(folder).exit_code == 2
    os.chown(folder / "run.yaml", NOBODY, -1)
    done = check(folder)
    assert done.exit_code == 0 and str(folder / "sites") in done.output


@pytest.mark.timeout(20)
@pytest.mark.parametrize("part", ["sites/local.yaml", "run.yaml"])
def test_a_pipe_in_its_place_is_not_waited_for(folder: Path, part: str) -> None:
    (folder / part).unlink()
    os.mkfifo(folder / part)
    done = check(folder)
    assert done.exit_code == 2
    assert has_parts(done.output, f"{folder / part}: ", "regular file")


@pytest.mark.parametrize("path", ["/dev/fd/{}", "/proc/self/fd/{}"])
def test_the_pipe_of_a_shell_is_read(folder: Path, path: str) -> None:
    """As in `bsl config check <(command)`."""
    reader, writer = os.pipe()
    os.write(writer, (folder / "run.yaml").read_bytes())
    os.close(writer)
    try:
        done = CliRunner().invoke(bsl, ["config", "check", path.format(reader)])
    finally:
        os.close(reader)
    assert done.exit_code == 0, done.output
