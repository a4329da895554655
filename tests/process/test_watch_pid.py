"""`bsl watch --pid`: a launcher on this machine that `bsl` did not start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .conftest import Launch

WATCH = (sys.executable, "-m", "bigsci_launch", "watch", "--pid")


def test_a_stopped_rank_below_a_launcher_is_a_finding(launch: Launch, tmp_path: Path) -> None:
    launched = launch("hung_rank.py", [*["wait_for_peers {ready}"] * 3, "stop_here {ready}"])
    argv = [*WATCH, str(launched.pid), "--once", "--json"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    seen = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300, check=False)
    document: dict[str, Any] = json.loads(seen.stdout)
    assert len(document["findings"]) == 1, (document["sentence"], document["blind"], document["remarks"])
    (finding,) = document["findings"]
    assert (seen.returncode, document["is_over"], finding["kind"], finding["accuses"]) == (1, False, "hang", True)
    assert finding["sentence"].startswith("rank 3 ") and Path(finding["bundle"]).is_relative_to(tmp_path), finding


def test_it_ends_with_the_launcher_and_its_processes(launch: Launch, tmp_path: Path) -> None:
    launched = launch("hung_rank.py", ["load_batch {ready}"] * 2)
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    watcher = subprocess.Popen([*WATCH, str(launched.pid)], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert watcher.stdout is not None and "watching" in watcher.stdout.readline()
        for pid in (launched.pid, *launched.descendants()):
            os.kill(pid, signal.SIGKILL)
        launched.process.wait(60)
        assert "is over" in watcher.communicate(timeout=120)[0]
    finally:
        watcher.kill()
    assert watcher.returncode == 0


def test_a_process_that_is_not_there_is_one_sentence() -> None:
    done = subprocess.run([*WATCH, "4194303"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode not in (0, 1) and "no process 4194303" in done.stderr, done
