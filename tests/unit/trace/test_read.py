"""Rings on disk: until when a rank was in the calls that it has not left."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bigsci_launch
from bigsci_launch.trace.read import HEARTBEAT_S, read_files

DIAGNOSTICS = Path(bigsci_launch.__file__).parent / "assets" / "diagnostics"
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from ring_file import BEAT_AT, FACTS, Ring
ring = Ring(sys.argv[2], rank=0, world_size=1)
ring.lane().enter(FACTS.pack(ring.name("recv"), 0, 0, 0, 1, 8))
print(BEAT_AT)
"""


@pytest.mark.parametrize(
    ("heartbeat_s", "file_s", "known_s"),
    [
        pytest.param(1000.0, 995.0, 995.0, id="the copy of a rank that has ended"),
        pytest.param(1000.0, 5000.0, 1000.0 - HEARTBEAT_S, id="a ring that a lost process left"),
        pytest.param(5.0, 5000.0, 0.0, id="the ring of a rank that runs"),
    ],
)
def test_a_call_that_has_not_ended_lasts_no_longer_than_its_rank(
    tmp_path: Path, heartbeat_s: float, file_s: float, known_s: float
) -> None:
    path = tmp_path / "77.ring"
    argv = [sys.executable, "-c", PROGRAM, str(DIAGNOSTICS), str(path)]
    beat_at = int(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300).stdout)
    now = time.time()
    with path.open("r+b") as stream:
        stream.seek(beat_at)
        stream.write(struct.pack("<d", now - heartbeat_s))
    os.utime(path, (now - file_s, now - file_s))
    [read] = read_files([path])
    assert read.ring is not None and [call.operation for call in read.ring.open_calls] == ["recv"]
    assert read.ring.read == pytest.approx(now - known_s, abs=3.0)
