"""Ranks on this machine that keep rings, each with its runner."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import bigsci_launch

DIAGNOSTICS = Path(bigsci_launch.__file__).parent / "assets" / "diagnostics"
Reply = dict[str, Any]


def read(*paths: Path, num_last: int = 32) -> list[Reply]:
    argv = [sys.executable, "-I", "-S", str(DIAGNOSTICS / "node_ring.py"), str(num_last), *map(str, paths)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30)
    return list(json.loads(done.stdout).values())


class Ranks:
    """Ranks on this machine, each with its runner."""

    def __init__(self, folder: Path) -> None:
        self.attempt, self.rings = folder / "run" / "attempts" / "0001", folder / "node"
        self.rings.mkdir()
        self.runner = [str(DIAGNOSTICS / "rank_runner.py")]
        self.runners: list[subprocess.Popen[bytes]] = []

    def start(self, program: list[str], size: int, ring: str | None = None, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
        for rank in range(size):
            options = ["--attempt-dir", str(self.attempt), "--topology", f"tp={size}", "--ranks-per-node", str(size)]
            options += ["--rank", str(rank), "--ring", ring or str(self.rings)]
            argv = [sys.executable, "-I", "-S", *self.runner, *options, "--", *program]
            self.runners.append(subprocess.Popen(argv, env=given))

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
        return [runner.wait(60) for runner in self.runners]


HOOK = (
    f"import sys; sys.path.insert(0, {str(DIAGNOSTICS)!r}); import ring_hook, os\nfrom ring_file import FACTS, NONE\n"
)


def hooked(folder: Path, program: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "BSL_RING_DIR": str(folder), "RANK": "3", "WORLD_SIZE": "4"}
    return subprocess.run(
        [python, "-c", HOOK + program], env=given, capture_output=True, text=True, timeout=60, check=True
    )


def find_python(version: str) -> str | None:
    """Return a Python of this version that is installed next to that of the tests, or on PATH."""
    installed = sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python3"))
    return str(installed[-1]) if installed else shutil.which(f"python{version}")
