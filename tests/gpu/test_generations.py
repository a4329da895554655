"""Groups over NCCL are aborted and formed again in the same process, as `survive` does. One rank blocks on no peer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

PROGRAM = Path(__file__).parent / "programs" / "generations.py"


def test_groups_are_aborted_and_formed_again_in_the_same_process() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), "nccl"], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("generation ") == 3
    print(done.stdout)
