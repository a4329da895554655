"""The kill of a rank on its node reaches that process, and no later one with its number."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bigsci_launch.procfs import start_ticks
from bigsci_launch.rehearse.attempt import KILL_RANK


def kill(pid: int, start: int) -> str:
    argv = ["sh", "-c", KILL_RANK, "sh", str(pid), str(start)]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def test_a_rank_is_killed_only_if_it_still_is_that_process(tmp_path: Path) -> None:
    program = tmp_path / "a) 1 (b"  # a name that looks like other fields
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "60"])
    start = start_ticks(process.pid)
    assert start is not None
    assert kill(process.pid, start + 1) == "" and process.poll() is None
    assert kill(process.pid, start) == "sent\n" and process.wait(10) == -9
    assert kill(process.pid, start) == ""
