"""Ranks on this machine that keep rings, each with its runner."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import bigsci_launch
from bigsci_launch.hang_lab.nursery import Nursery
from tests.support.ports import find_port
from tests.support.waiting import wait_until

DIAGNOSTICS = Path(bigsci_launch.__file__).parent / "assets" / "diagnostics"
Reply = dict[str, Any]


def read(*paths: Path, num_last: int = 32) -> list[Reply]:
    argv = [sys.executable, "-I", "-S", str(DIAGNOSTICS / "node_ring.py"), str(num_last), *map(str, paths)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300)
    return list(json.loads(done.stdout).values())


class Ranks:
    """Ranks on this machine, each with its runner."""

    def __init__(self, folder: Path) -> None:
        self.attempt, self.rings = folder / "run" / "attempts" / "0001", folder / "node"
        self.rings.mkdir()
        self.runner = [str(DIAGNOSTICS / "rank_runner.py")]
        self.runners: list[subprocess.Popen[bytes]] = []

    def start(self, program: list[str], size: int, ring: str | None = None, **environment: str) -> None:
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port()), **environment}
        for rank in range(size):
            options = ["--attempt-dir", str(self.attempt), "--topology", f"tp={size}", "--ranks-per-node", str(size)]
            options += ["--rank", str(rank), "--ring", ring or str(self.rings)]
            self.start_runner([*options, "--", *program], given)

    def start_runner(self, arguments: list[str], environment: dict[str, str]) -> None:
        argv = [sys.executable, "-I", "-S", *self.runner, *arguments]
        self.runners.append(subprocess.Popen(argv, env={**os.environ, **environment}))

    def record(self, rank: int, folder: str = "pids") -> Reply:
        return dict(json.loads((self.attempt / folder / f"rank-{rank:04d}.json").read_text()))

    def log(self, rank: int) -> str:
        path = self.attempt / "logs" / f"rank-{rank:04d}.log"
        return path.read_text() if path.exists() else ""

    def live(self, rank: int) -> Path:
        record = self.record(rank)
        return Path(record["rings"]) / f"{record['pid']}.ring"

    def kept(self, rank: int) -> Path:
        return self.attempt / "rings" / f"rank-{rank:04d}.ring"

    def wait(self) -> list[int]:
        return [runner.wait(180) for runner in self.runners]


class ForkedRanks(Ranks):
    """Ranks that are forked from a process that has imported torch, each with its runner."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        super().__init__(folder)
        self._nursery, self._forked = nursery, list[int]()

    def start_runner(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._forked.append(self._nursery.start(arguments, environment, self.rings.parent / "runner.out"))

    def terminate(self) -> None:
        """Have all runners end their ranks, and wait for them."""
        for pid in self._forked:
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self._forked))

    def end(self) -> None:
        pids = [json.loads(path.read_text())["pid"] for path in (self.attempt / "pids").glob("*.json")]
        for pid in (*pids, *self._forked):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


HOOK = (
    f"import sys; sys.path.insert(0, {str(DIAGNOSTICS)!r}); import ring_hook, os\nfrom ring_file import FACTS, NONE\n"
)


def hooked(folder: Path, program: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "BSL_RING_DIR": str(folder), "RANK": "3", "WORLD_SIZE": "4"}
    return subprocess.run(
        [python, "-c", HOOK + program], env=given, capture_output=True, text=True, timeout=300, check=True
    )


def find_python(version: str) -> str | None:
    """Return a Python of this version that is installed next to that of the tests, or on PATH."""
    installed = sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python3"))
    return str(installed[-1]) if installed else shutil.which(f"python{version}")
