"""`bsl diff-weights` of large sides, next to a real Slurm: the hint gives the line that compares them on a node."""

from __future__ import annotations

import json
import shlex
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.checkpoints.around import UNASKED_BYTES

pytestmark = pytest.mark.slurm


def write_zeros(path: Path, num_bytes: int) -> Path:
    """Write one tensor of zeros that takes no room on the disk."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + num_bytes)
    return path


@pytest.mark.parametrize(("num_bytes", "is_hinted"), [(UNASKED_BYTES - 4096, False), (UNASKED_BYTES, True)])
def test_the_line_of_the_hint_gives_the_same_answer(
    isolated_cluster: Any, short_tmp_path: Path, num_bytes: int, is_hinted: bool
) -> None:
    sides = [str(write_zeros(short_tmp_path / f"{name}.safetensors", num_bytes)) for name in "ab"]
    here = isolated_cluster.bsl("diff-weights", *sides, "--sample", "0.01%", "--json")
    hints = [line for line in here.stderr.splitlines() if line.startswith("hint: ")]
    assert (here.returncode, len(hints)) == (4, is_hinted)  # of a sample, nothing is said to be equal
    for hint in hints:
        argv = shlex.split(hint[hint.index("srun") :])
        argv[argv.index("bsl")] = str(Path(sys.executable).with_name("bsl"))
        there = isolated_cluster.run(*argv)
        assert json.loads(there.stdout) == json.loads(here.stdout)
        assert "hint: " not in there.stderr
