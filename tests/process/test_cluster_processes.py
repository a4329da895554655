"""Starting, recording and ending processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bigsci_launch.errors import ClusterError
from bigsci_launch.minicluster import daemons
from bigsci_launch.minicluster.daemons import (
    Recorded,
    Started,
    boot_id,
    kill_children,
    kill_cluster_processes,
    living,
    read_record,
    require_programs,
    require_tool,
    start_daemon,
    wait_until,
)
from bigsci_launch.minicluster.directory import ClusterDir
from bigsci_launch.minicluster.proctree import descendants
from bigsci_launch.procfs import read_process, read_processes


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[ClusterDir]:
    made = ClusterDir(tmp_path / "c")
    made.path.mkdir()
    made.claim()
    made.logs.mkdir()
    yield made
    kill_cluster_processes(made)


@pytest.fixture
def start(directory: ClusterDir) -> Iterator[Callable[..., Started]]:
    """`start_daemon` in the directory; daemons that still run at the end are ended and waited for."""
    started: list[Started] = []

    def start(name: str, argv: list[str]) -> Started:
        started.append(start_daemon(directory, name, argv))
        return started[-1]

    yield start
    kill_cluster_processes(directory)
    for daemon in started:
        daemon.dismiss()


def test_a_daemon_is_recorded_runs_and_ends(directory: ClusterDir, start: Callable[..., Started]):
    daemon = start("sleeper", ["sleep", "99"])
    assert [(one.name, one.pid) for one in living(read_record(directory), read_processes())] == [
        ("sleeper", daemon.pid)
    ]
    assert kill_cluster_processes(directory) == 1
    assert daemon.popen.wait(180) == -9
    assert living(read_record(directory), read_processes()) == []


def test_a_daemon_does_nothing_before_it_is_in_the_record(directory: ClusterDir, tmp_path: Path, monkeypatch):
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(daemons, "_append_record", full_disk)
    with pytest.raises(OSError, match="No space"):
        start_daemon(directory, "toucher", ["touch", str(tmp_path / "touched")])
    # The shell has read the end of its input and has exited.
    assert not (tmp_path / "touched").exists()
    assert not [one for one in read_processes().values() if one.parent_pid == os.getpid() and one.command == "sh"]


def test_children_and_grandchildren_end_with_a_daemon(directory: ClusterDir, start: Callable[..., Started]):
    start("family", ["sh", "-c", "sh -c 'sleep 99 & wait' & wait"])
    assert wait_until(lambda: len(_tree(directory)) == 3, 180)
    pids = _tree(directory)
    assert kill_cluster_processes(directory) == 3
    assert not pids & read_processes().keys()


def _tree(directory: ClusterDir) -> set[int]:
    now = read_processes()
    return set(descendants([one.pid for one in read_record(directory)], now))


def test_a_daemon_sees_nothing_of_the_callers_environment(
    directory: ClusterDir, start: Callable[..., Started], monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    daemon = start("printer", ["env"])
    daemon.popen.wait(180)
    names = {line.partition("=")[0] for line in directory.output("printer").read_text().splitlines()}
    assert "SLURM_JOB_ID" not in names
    assert "SLURM_CONF" in names


def test_a_later_process_with_a_recorded_pid_is_not_ours():
    us = read_process(os.getpid())
    assert us is not None
    now = {us.pid: us}
    ours = Recorded("x", us.pid, us.start_ticks, boot_id())
    assert living([ours], now) == [ours]
    assert living([Recorded("x", us.pid, us.start_ticks - 1, boot_id())], now) == []
    assert living([Recorded("x", us.pid, us.start_ticks, "another boot")], now) == []


def test_a_torn_last_line_of_the_record_is_left_out(directory: ClusterDir):
    line = json.dumps({"name": "x", "pid": 5, "start_ticks": 6, "boot_id": "b"})
    directory.processes.write_text(f'{line}\n{{"name": "sl')
    assert read_record(directory) == [Recorded("x", 5, 6, "b")]


def test_a_process_that_does_not_end_is_named(directory: ClusterDir, start: Callable[..., Started], monkeypatch):
    monkeypatch.setattr(daemons, "KILL_TIMEOUT_S", 0.1)
    monkeypatch.setattr(daemons, "_signal", lambda pid, number: None)
    daemon = start("sleeper", ["sleep", "99"])
    assert wait_until(lambda: _named(daemon.pid, "sleep"), 180)
    with pytest.raises(ClusterError, match=f"sleep {daemon.pid}") as caught:
        kill_cluster_processes(directory)
    assert "repeated" in str(caught.value.hint)
    assert directory.is_cluster
    monkeypatch.undo()


def _named(pid: int, command: str) -> bool:
    found = read_process(pid)
    return found is not None and found.command == command


def test_only_children_are_killed():
    parent = subprocess.Popen(["sh", "-c", "sleep 99; exit 3"])
    assert wait_until(lambda: any(one.parent_pid == parent.pid for one in read_processes().values()), 180)
    assert kill_children(parent.pid) == 1
    assert parent.wait(180) == 3
    assert kill_children(parent.pid) == 0


def test_every_missing_program_is_named(monkeypatch):
    monkeypatch.setattr(daemons, "SYSTEM_PATH", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere/either")
    with pytest.raises(ClusterError, match="slurmd, munged") as caught:
        require_programs(["slurmd", "munged"])
    assert "install.sh" in str(caught.value.hint)


def test_programs_of_sbin_are_found_by_an_ordinary_user(monkeypatch, tmp_path: Path):
    program = tmp_path / "slurmd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(daemons, "SYSTEM_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert require_programs(["slurmd"]) == {"slurmd": str(program)}


def test_a_tool_that_fails_is_quoted():
    with pytest.raises(ClusterError, match="sh -c echo no >&2; exit 4: no"):
        require_tool(["sh", "-c", "echo no >&2; exit 4"])
    assert require_tool(["cat"], text="words") == "words"


def test_a_tool_that_is_silent_is_an_error(monkeypatch):
    monkeypatch.setattr(daemons, "TOOL_TIMEOUT_S", 0.05)
    with pytest.raises(ClusterError, match="sleep: no answer"):
        require_tool(["sleep", "5"])
