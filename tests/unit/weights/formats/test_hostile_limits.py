"""Hostile files that are large: each is refused with little memory, and in the time of an honest file."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .hostile_files import LARGE_SAFETENSORS, LARGE_TEXTS, LARGE_TORCH, safetensors

# In units of what an honest file of NUM_TENSORS costs. A reader that compares every key with every other one needs
# more than ten times as much for the smallest of these files.
MAX_COST = 10
NUM_TENSORS = 30_000
MAX_BYTES = 256 << 20
CASES = {
    **{f"{name}.safetensors": write for name, write in LARGE_SAFETENSORS.items()},
    **{f"{name}.pt": write for name, write in LARGE_TORCH.items()},
    **{f"{name}.txt": write for name, write in LARGE_TEXTS.items()},
}


# Starts Python once, and compares each file in a process of its own: prints the process, its exit code and its time.
SERVER = """
import os, sys
from bigsci_launch.cli.main import main
from bigsci_launch.weights.compare import compare
for line in sys.stdin:
    path = line.rstrip()
    child = os.fork()
    if not child:
        answer = os.open(path + ".answer", os.O_WRONLY | os.O_CREAT)
        os.dup2(answer, 1)
        os.dup2(answer, 2)
        sys.argv = ["bsl", "diff-weights", path, path]
        main()
    print(child, flush=True)
    _, status, used = os.wait4(child, 0)
    print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        yield process


@dataclass(frozen=True)
class Reading:
    """How a file was read: exit code, seconds of a processor without the start of Python, memory, what was printed."""

    code: int
    seconds: float
    most_bytes: int
    said: str


def read(server: Any, path: Path) -> Reading:
    print(path, file=server.stdin)
    pid, most = int(server.stdout.readline()), 0
    while now := anonymous_bytes(pid):
        most = max(most, now)
        time.sleep(0.005)
    code, seconds = server.stdout.readline().split()
    return Reading(int(code), float(seconds), most, Path(f"{path}.answer").read_text())


@pytest.fixture(scope="module")
def honest_seconds(server: Any, tmp_path_factory: pytest.TempPathFactory) -> float:
    """What an honest file costs in the same process: 3 MB of names and shapes, and a tensor for each."""
    path = tmp_path_factory.mktemp("honest") / "honest.safetensors"
    entries = {
        f"layers.{number}.weight": {"dtype": "F32", "shape": [2], "data_offsets": [8 * number, 8 * number + 8]}
        for number in range(NUM_TENSORS)
    }
    path.write_bytes(safetensors(entries, bytes(8 * NUM_TENSORS)))
    reading = read(server, path)
    assert reading.code == 0, reading.said
    return reading.seconds


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process apart from mapped files; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(match[1]) << 10 if match else 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_large_hostile_file_costs_little(tmp_path: Path, server: Any, honest_seconds: float, name: str) -> None:
    write: Callable[[], bytes] = CASES[name]
    path = tmp_path / name
    path.write_bytes(write())
    reading = read(server, path)
    path.unlink()
    is_read = "of one hash" in name or "storage" in name
    assert reading.code == (0 if is_read else 4), reading.said
    assert is_read or str(path) in reading.said
    assert "Traceback" not in reading.said
    assert reading.seconds < MAX_COST * honest_seconds
    assert 0 < reading.most_bytes < MAX_BYTES
