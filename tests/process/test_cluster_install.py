"""slurm/minicluster/install.sh where it may not install anything, and the shell code next to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.texts import CheckText

MINICLUSTER = Path(__file__).parents[2] / "slurm" / "minicluster"


@pytest.fixture
def poor_path(tmp_path: Path) -> str:
    """A PATH with only bash and id: no Slurm and no apt-get."""
    for name in ("bash", "id"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    return str(tmp_path)


def run(path: str, stdin: int = subprocess.DEVNULL, **more: str) -> subprocess.CompletedProcess[str]:
    argv, environment = ["bash", str(MINICLUSTER / "install.sh")], {"PATH": path, **more}
    return subprocess.run(argv, env=environment, stdin=stdin, capture_output=True, text=True, timeout=300)


def test_where_nothing_may_be_installed_it_says_why(poor_path: str, check_text: CheckText) -> None:
    done = run(poor_path)
    assert done.returncode == 1
    check_text(done.stderr)


def test_an_ordinary_user_without_sudo_is_told_so(poor_path: str, check_text: CheckText) -> None:
    (Path(poor_path) / "apt-get").symlink_to("/bin/false")
    make_program(poor_path, "id", "echo 1000")
    done = run(poor_path)
    assert done.returncode == 1
    check_text(done.stderr)


def make_program(folder: str, name: str, does: str) -> None:
    path = Path(folder) / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/bash\n{does}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("answer", "uid", "more", "installs"),
    [
        (b"n\n", 0, {}, False),
        (b"\n", 1000, {"CI": "1"}, False),
        (b"y\n", 1000, {}, True),
        (None, 1000, {}, False),
        (None, 1000, {"CI": "1"}, True),
        (None, 0, {}, True),
    ],
)
def test_it_asks_on_a_terminal_and_takes_no_rights_without_one(
    poor_path: str, answer: bytes | None, uid: int, more: dict[str, str], installs: bool
) -> None:
    for name in ("sudo", "env"):
        make_program(poor_path, name, 'while [[ "$1" == -* || "$1" == *=* ]]; do shift; done; "$@"')
    (Path(poor_path) / "true").symlink_to("/bin/true")
    make_program(poor_path, "id", f"echo {uid}")
    make_program(poor_path, "apt-get", f"echo >> {poor_path}/called")
    typed, terminal = os.openpty()
    try:
        if answer is not None:
            os.write(typed, answer)
        done = run(poor_path, subprocess.DEVNULL if answer is None else terminal, **more)
    finally:
        os.close(typed)
        os.close(terminal)
    assert (Path(poor_path) / "called").exists() is installs, done.stderr
    assert done.returncode == (0 if installs else 1)


def test_where_all_is_installed_it_is_silent(tmp_path: Path) -> None:
    for name in (
        "sbatch",
        "slurmctld",
        "slurmd",
        "munged",
        "ip",
        "nsenter",
        "unshare",
        "mount",
        "hostname",
        "shellcheck",
    ):
        (tmp_path / name).symlink_to("/bin/true")
    done = run(f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("script", sorted(MINICLUSTER.glob("*.sh")), ids=lambda script: script.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
