"""`bsl cluster down` leaves no processes, interfaces, mounts or files behind, whatever happened to `up`.

Every try runs in a sandbox of namespaces, so "nothing" is exact, and a failure of this test leaves nothing either.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slurm

BREAK = Path(__file__).parent / "programs" / "break_clusters.py"
# slurmctld needs an address other than 127.0.0.1 before it listens at all.
SANDBOX = 'ip link set lo up && ip address add 127.0.0.2/8 dev lo && exec "$@"'
NAMESPACES = ("--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc")

Tries = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def tries(slurm_packages: None, short_tmp_path: Path) -> Tries:
    """Run break_clusters.py in its sandbox and return one document per try."""

    def run(how: str, *argv: str) -> list[dict[str, Any]]:
        program = [sys.executable, str(BREAK), str(short_tmp_path), how, *argv]
        done = subprocess.run(
            ["unshare", *NAMESPACES, "/bin/sh", "-c", SANDBOX, "sh", *program],
            capture_output=True,
            text=True,
            timeout=800,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


def assert_nothing_left(tries: list[dict[str, Any]]) -> None:
    for one in tries:
        assert one["down"] == 0, one
        assert one["left"] == {}, one


def kinds(tries: list[dict[str, Any]], key: str) -> set[str]:
    return {name for one in tries for name in one["broken"].get(key, [])}


@pytest.mark.long
def test_an_isolated_up_killed_before_any_of_its_side_effects(tries: Tries) -> None:
    found = tries("effects", "--nodes", "1", "--gpus-per-node", "1", "--isolated")
    assert_nothing_left(found)
    assert len(found) > 30
    # There was something to clean up.
    assert {"munged", "unshare", "slurmctld", "slurmd"} <= kinds(found, "processes")
    assert kinds(found, "interfaces") == {"bsl0"}


@pytest.mark.long
def test_a_shared_up_killed_before_any_of_its_side_effects(tries: Tries) -> None:
    found = tries("effects", "--nodes", "1", "--gpus-per-node", "1")
    assert_nothing_left(found)
    assert len(found) > 20
    assert {"munged", "slurmctld", "slurmd"} <= kinds(found, "processes")


@pytest.mark.long
def test_an_isolated_up_killed_at_any_moment(tries: Tries) -> None:
    found = tries("moments", "--nodes", "2", "--isolated")
    assert_nothing_left(found)
    assert len(found) > 3


@pytest.mark.parametrize("how", ["few-downs", pytest.param("downs", marks=pytest.mark.long)])
def test_a_down_that_is_killed_can_be_repeated(tries: Tries, how: str) -> None:
    found = tries(how, "--nodes", "1", "--gpus-per-node", "0")
    assert_nothing_left(found)
    assert {"slurmstepd", "sleep", "slurmctld", "slurmd"} <= kinds(found, "processes")


@pytest.mark.parametrize("how", [pytest.param((), marks=pytest.mark.long), ("--isolated",)], ids=["shared", "isolated"])
def test_an_up_that_fails_removes_what_it_made(tries: Tries, how: tuple[str, ...]) -> None:
    found = tries("failures", "--nodes", "2", *how)
    assert_nothing_left(found)
    assert [one["broken"] for one in found] == [{}, {}]
    assert found[0]["returncode"] == 3
    assert found[1]["returncode"] == 130
