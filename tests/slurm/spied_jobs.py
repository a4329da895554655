"""Jobs whose ranks hang in one place, and what `bsl spy --jobid` says about them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until

from .conftest import SlurmCluster

HUNG = """
import os, pathlib, signal, time
def load_batch(): time.sleep(300)
def wait_for_peers(): time.sleep(300)
def stop_here(): os.kill(os.getpid(), signal.SIGSTOP)
def die(): os.kill(os.getpid(), signal.SIGKILL)
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
pathlib.Path("{folder}", "ready-" + rank).touch()
{place}() if rank == "{odd}" else wait_for_peers()
"""


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of one test on one cluster, ended with the test."""

    cluster: SlurmCluster
    folder: Path

    def submit(self, body: str, *options: str) -> str:
        """Submit a plain batch script, as users without bsl do."""
        script = self.folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{body}\n")
        done = self.cluster.run("sbatch", "--parsable", "-o", f"{self.folder}/job.out", *options, str(script))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def spy(self, job: str, *options: str, rc: int = 0) -> dict[str, Any]:
        words = ["spy", "--jobid", job, "--output", str(self.folder / f"evidence-{time.monotonic_ns()}"), "--json"]
        done = self.cluster.bsl(*words, *options)
        assert done.returncode == rc, (done.stderr, (self.folder / "job.out").read_text())
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def cancel(self, job: str) -> None:
        self.cluster.run("scancel", job)
        wait_until(lambda: not self.cluster.run("squeue", "-h", "-j", job).stdout.strip())


def hung_processes(folder: Path, odd: int, place: str = "load_batch") -> str:
    """Return a shell line for srun: task `odd` hangs in `place`, others in wait_for_peers; all write ready files."""
    (folder / "hung.py").write_text(HUNG.format(folder=folder, place=place, odd=odd))
    return f"{sys.executable} {folder}/hung.py"


def ready(folder: Path, count: int) -> Callable[[], bool]:
    return lambda: len(list(folder.glob("ready-*"))) == count


def suspect(document: dict[str, Any]) -> dict[str, Any]:
    """The accused or, where the ranks have not slept for long enough to accuse one, the first to look at."""
    verdict = document["verdict"]
    assert len(verdict["suspects"]) == (verdict["state"] != "waiting"), verdict
    found: dict[str, Any] = (verdict["suspects"] or verdict["look_first"])[0]
    return found
