"""Hostile files that are large: each is refused with little time and memory, compared with itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .hostile_files import LARGE_SAFETENSORS, LARGE_TEXTS, LARGE_TORCH

# Time of a processor, with room for a busy machine: two seconds on an idle one.
MAX_SECONDS = 4.0
MAX_BYTES = 256 << 20
CASES = {
    **{f"{name}.safetensors": write for name, write in LARGE_SAFETENSORS.items()},
    **{f"{name}.pt": write for name, write in LARGE_TORCH.items()},
    **{f"{name}.txt": write for name, write in LARGE_TEXTS.items()},
}


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process apart from mapped files; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(match[1]) << 10 if match else 0


@pytest.mark.parametrize("name", CASES)
def test_a_large_hostile_file_costs_little(tmp_path: Path, name: str) -> None:
    write: Callable[[], bytes] = CASES[name]
    path = tmp_path / name
    path.write_bytes(write())
    command = [sys.executable, "-m", "bigsci_launch", "diff-weights", str(path), str(path)]
    with (tmp_path / "answer").open("w+") as answer:
        process = subprocess.Popen(command, stdout=answer, stderr=subprocess.STDOUT)
        most = 0
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            most = max(most, anonymous_bytes(process.pid))
            time.sleep(0.005)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        answer.seek(0)
        said = answer.read()
    path.unlink()
    is_read = "of one hash" in name or "storage" in name
    assert process.returncode == (0 if is_read else 4), said
    assert is_read or str(path) in said
    assert "Traceback" not in said
    assert used.ru_utime + used.ru_stime < MAX_SECONDS
    assert most < MAX_BYTES
