"""An attempt as its ranks leave it: records, logs and the output of the job, written by a test."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from bigsci_launch.launch.job.frozen import job_program
from bigsci_launch.launch.job.program import main
from bigsci_launch.runs.layout import AttemptDir, read_json, write_json
from bigsci_launch.topology import Topology

TOPOLOGY = Topology(tp=2, pp=2, dp=2)
NODES = ("n1", "n2", "n3", "n4")


@cache
def program_argv() -> list[str]:
    """Return the command of the job script's program, built as for an attempt."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "bsl-job.pyz"
    path.write_bytes(job_program())
    return [sys.executable, "-I", "-S", str(path)]


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the job script's program in this process, with its output in files."""
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = main(arguments)
        finally:
            for number, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


class Attempt:
    """An attempt of 8 ranks on 4 nodes, which started at second 10."""

    def __init__(self, path: Path, ranks_per_node: int = 2) -> None:
        self.dir = AttemptDir(path)
        self.ranks_per_node = ranks_per_node
        self.dir.make()
        for rank in range(8):
            self.starts(rank, time=10.0)

    def identity(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "node": NODES[rank // self.ranks_per_node],
            "coordinate": TOPOLOGY.coordinate(rank).as_dict(),
        }

    def starts(self, *ranks: int, time: float) -> None:
        for rank in ranks:
            write_json(self.dir.pid_file(rank), {**self.identity(rank), "pid": 1000 + rank, "started": time})

    def exits(self, *ranks: int, code: int | None = 0, signal: str | None = None, **more: Any) -> None:
        for rank in ranks:
            write_json(self.dir.exit_file(rank), self.exit_record(rank, code=code, signal=signal, **more))

    def exit_record(self, rank: int, **fields: Any) -> dict[str, Any]:
        return {**self.identity(rank), "code": None, "signal": None, "time": 100.0, "terminated": None, **fields}

    def fails(self, rank: int, message: str, *, time: float, kind: str = "RuntimeError", **more: Any) -> None:
        record = {**self.identity(rank), "step": 7, "type": kind, "message": message, "time": time}
        write_json(self.dir.error_file(rank), record)
        self.exits(rank, code=1, time=time + 0.5, **more)

    def is_stopped_by_a_guard(self, message: str, *, accused: list[int], suspects: list[int], first: int = 0) -> None:
        """All ranks raise what a guard has found, `first` before the others."""
        for rank in range(8):
            moment = 50.0 if rank == first else 50.2 + rank / 100
            self.fails(rank, message, time=moment, kind="GuardError")
            error = read_json(self.dir.error_file(rank))
            write_json(self.dir.error_file(rank), {**error, "accused": accused, "suspects": suspects})

    def event(self, *ranks: int, **fields: Any) -> None:
        for rank in ranks:
            self.dir.event_file(rank).write_text(json.dumps({"time": 50.0, "step": 7, **fields}) + "\n")

    def logs(self, *ranks: int, text: str, time: float = 90.0) -> None:
        """Write the lines of `text` to the logs of the ranks, all with one time."""
        stamp = datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        for rank in ranks:
            self.dir.log_file(rank).write_text("".join(f"{stamp} {line}\n" for line in text.splitlines()))

    def output(self, *lines: str) -> None:
        """Write job.out, with the line that says that the attempt started."""
        start = f"2026-11-23T01:00:00Z bsl: start attempt={self.dir.name} job=6 restart=0 nodes=n[1-4]"
        self.dir.job_output.parent.mkdir(exist_ok=True)
        with self.dir.job_output.open("a") as stream:
            stream.write("\n".join([start, *lines, ""]))

    def describe(self, *options: str, code: int | None) -> dict[str, Any]:
        done = self.run(*options, code=code)
        assert done.returncode == 0, done.stderr
        return json.loads(self.dir.exit.read_text())

    def run(self, *options: str, code: int | None) -> subprocess.CompletedProcess[str]:
        """Run the program of the job script."""
        argv = ["exit-reason", "--attempt-dir", str(self.dir.path), "--world-size", "8", "--started", "10"]
        done = run_here(*argv, *(["--exit-code", str(code)] if code is not None else []), *options)
        self.line, self.code = done.stderr, done.stdout.strip()
        return done
