"""A job with `survive`: a real controller with its runners and ranks, and its records."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigsci_launch.config.load import dump_resolved, load_run
from tests.support.listening import processes_of
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}
PRELUDE = """
import os, signal, sys, time
RANK, GENERATION = int(os.environ["RANK"]), int(os.environ["BSL_GENERATION"])
print("up", GENERATION, os.environ["WORLD_SIZE"], flush=True)
"""


class Job:
    """An attempt with `survive`, as its records show it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempt = folder / "runs" / "run" / "attempts" / "0001"
        self.process: subprocess.Popen[str] | None = None

    def write(self, program: str, *, dp: int = 4, **more: Any) -> Path:
        config = {
            "run": {"name": "run", "command": [sys.executable, "-c", PRELUDE + program]},
            "slurm": {"site": "local"},
            "parallelism": {"data_parallel_size": dp},
            "model": MODEL,
            "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 12},
            "data": {"prefix": "none"},
            "monitor": {"watch": "off"},
            "survive": True,
            **more,
        }
        path = self.folder / "run.yaml"
        path.write_text(json.dumps(config))
        return path

    def submit(self) -> subprocess.Popen[str]:
        """Start it as a user does, on this machine."""
        argv = [sys.executable, "-m", "bigsci_launch", "submit", "run.yaml"]
        return self._start(argv)

    def start_step(self, num_nodes: int, per_node: int, level: str, *program: str, dp: int) -> None:
        """Start it as a job script of Slurm does, with nodes that are made up."""
        config = load_run(self.write("pass", dp=dp)).config
        self.attempt.mkdir(parents=True)
        (self.attempt / "config.yaml").write_text(dump_resolved(config))
        options = ["--attempt-dir", str(self.attempt)]
        self._start(
            [
                *(sys.executable, "-I", "-m", "bigsci_launch.recover.controller", *options, "--level", level),
                *("--slots", str(num_nodes * per_node), "--step"),
                *("--", sys.executable, str(PROGRAMS / "start_step.py"), str(num_nodes), str(per_node)),
                *(sys.executable, "-I", "-S", str(ROOT / "diagnostics" / "rank_runner.py"), *options),
                *("--topology", f"dp={dp}", "--ranks-per-node", str(per_node), "--survive", level),
                *("--", *program),
            ]
        )

    def _start(self, argv: list[str]) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            argv,
            cwd=self.folder,
            env={**os.environ, "MASTER_ADDR": "127.0.0.1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.process

    def end(self) -> int:
        """Wait for the end. Returns the exit code."""
        assert self.process is not None
        self.output = self.process.communicate(timeout=300)[0]
        return self.process.returncode

    def records(self, event: str = "") -> list[dict[str, Any]]:
        path = self.attempt / "recover" / "generations.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for line in lines if event in ((record := json.loads(line))["event"], "")]

    def wait_for(self, event: str, number: int = 1) -> dict[str, Any]:
        wait_until(lambda: len(self.records(event)) >= number)
        return self.records(event)[number - 1]

    def wait_for_step(self, generation: int) -> None:
        wait_until(
            lambda: any(
                (record["generation"], record["phase"]) == (generation, "first_step")
                for record in self.records("phase")
            )
        )

    def log(self, rank: int) -> str:
        path = self.attempt / "logs" / f"rank-{rank:04d}.log"
        return path.read_text() if path.exists() else ""

    def pid(self, rank: int, which: str = "pid") -> int:
        return int(json.loads((self.attempt / "pids" / f"rank-{rank:04d}.json").read_text())[which])

    def has_pid(self, rank: int) -> bool:
        """Whether its record is there, which is written after the process was started."""
        return (self.attempt / "pids" / f"rank-{rank:04d}.json").exists()

    def exit(self) -> dict[str, Any]:
        return dict(json.loads((self.attempt / "exit.json").read_text()))

    def processes(self) -> list[int]:
        """Return every process of the attempt: its folder is in the arguments or in the environment."""
        return processes_of(self.folder)


@contextlib.contextmanager
def job_in(folder: Path) -> Iterator[Job]:
    job = Job(folder)
    yield job
    if job.process is not None:
        job.process.terminate()
        try:
            job.process.wait(20)
        except subprocess.TimeoutExpired:
            job.process.kill()
        if job.process.stdout is not None:
            job.process.stdout.close()
    for pid in job.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
