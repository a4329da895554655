"""`bsl spy` of a rank that waits for its GPU: it is read without disturbing it, and the wait is in its stack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

PROGRAM = Path(__file__).parent / "programs" / "held_gpu.py"
BSL = "from bigsci_launch.cli.main import main; main()"


def spy_on(mode: str, folder: Path) -> dict[str, Any]:
    """Start a rank in this state, look at it, and return spy's answer."""
    ready = folder / "ready"
    place = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29400"
    line = f'{place} "$@"; exit $?'
    command = ["bash", "-c", line, "launcher", sys.executable, str(PROGRAM), mode, str(ready)]
    launcher = subprocess.Popen(command, start_new_session=True)
    try:
        until = time.monotonic() + 120
        while not ready.exists():
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(1.0)
        command = [sys.executable, "-c", BSL, "spy", "--local", "--pid", str(launcher.pid), "--json", "--settle", "5"]
        done = subprocess.run([*command, "--output", str(folder / "evidence")], capture_output=True, timeout=200)
        assert done.returncode in (0, 1), done.stderr.decode()
        assert launcher.poll() is None
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait(20)


@pytest.mark.parametrize("mode", ["synchronize", "spin"])
def test_the_wait_for_the_gpu_is_in_the_stack(mode: str, tmp_path: Path) -> None:
    answer = spy_on(mode, tmp_path)
    assert "wait_for_the_gpu" in json.dumps(answer), answer
    if mode == "synchronize":
        assert "synchronize" in json.dumps(answer)
