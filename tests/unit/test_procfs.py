"""Processes as the kernel shows them, whatever they are called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch import procfs
from bigsci_launch.procfs import Process, parse_stat, read_process, read_processes, start_ticks

FIELDS = "5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 4242 23"


@given(st.text(max_size=15))
def test_a_stat_line_is_read_whatever_the_command_is_called(command: str) -> None:
    found = parse_stat(f"17 ({command}) S 3 {FIELDS}\n")
    assert found == Process(
        17, command, state="S", parent_pid=3, session=6, cpu_ticks=14 + 15, start_ticks=4242, group=5
    )


@pytest.mark.parametrize("text", ["", "17", "17 (x) S 3", f"17 (x) S three {FIELDS}", f"(x) S 3 {FIELDS}"])
def test_a_text_that_is_none_of_the_kernels_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_stat(text)


def test_our_own_process_is_read() -> None:
    found = read_process(os.getpid())
    assert found is not None
    assert (found.pid, found.parent_pid, found.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert found.is_alive
    assert read_processes()[os.getpid()].start_ticks == found.start_ticks == start_ticks(os.getpid())
    now = os.times()
    assert found.cpu_ticks <= (now.user + now.system) * os.sysconf("SC_CLK_TCK") + 1


def test_a_process_that_is_not_there_is_none() -> None:
    assert read_process(2**22 + 1) is None
    assert start_ticks(2**22 + 1) is None


def test_a_process_that_is_hidden_from_us_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be read, as of other users' processes where /proc is mounted with `hidepid=1`."""
    monkeypatch.setattr(procfs, "PROC", tmp_path)
    (tmp_path / "17" / "stat").mkdir(parents=True)
    (tmp_path / "18").mkdir()
    (tmp_path / "18" / "stat").write_bytes(b"18 (\xff) ) S 3 " + FIELDS.encode())
    assert read_process(17) is None
    assert {pid: process.command for pid, process in read_processes().items()} == {18: "\ufffd) "}


def test_a_zombie_is_not_alive() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    found = read_process(pid)
    assert found is not None
    assert not found.is_alive
    assert start_ticks(pid) is None
    assert pid not in read_processes()
    os.waitpid(pid, 0)
