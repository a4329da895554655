"""A run of 8 ranks on 4 nodes with records as ranks write them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import AttemptDir, RunDir, write_json
from bigsci_launch.topology import Topology

TOPOLOGY = Topology(tp=2, pp=2, dp=2)


@dataclass
class Trial:
    """A run whose records a test writes."""

    run: RunDir
    now: float

    @property
    def attempt(self) -> AttemptDir:
        attempt = self.run.latest_attempt()
        assert attempt is not None
        return attempt

    def add_attempt(self, name: str, job_id: str = "12") -> AttemptDir:
        attempt = self.run.attempt(name)
        attempt.make()
        write_job(attempt, JobRecord("slurm", self.now - 100, job_id=job_id, total_steps=20))
        for rank in range(8):
            write_json(attempt.pid_file(rank), {**self.identity(rank), "pid": 1000 + rank, "started": self.now - 90})
        return attempt

    def identity(self, rank: int) -> dict[str, Any]:
        return {"rank": rank, "node": f"n{rank // 2}", "coordinate": TOPOLOGY.coordinate(rank).as_dict()}

    def event(self, rank: int, kind: str, age_s: float, **fields: Any) -> None:
        record = {"kind": kind, "time": self.now - age_s, **fields}
        with self.attempt.event_file(rank).open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        os.utime(self.attempt.event_file(rank), (record["time"], record["time"]))

    def ended(self, reason: str, exit_code: int | None, **fields: Any) -> None:
        write_json(self.attempt.exit, {"reason": reason, "exit_code": exit_code, "first_failure": None, **fields})

    def queue(self, name: str, job_id: str) -> None:
        """Queue an attempt behind the newest one."""
        attempt = self.run.attempt(name)
        attempt.make()
        write_job(attempt, JobRecord("slurm", self.now, job_id=job_id, total_steps=20))
        attempt.queued_mark.write_text("")

    def log(self, rank: int, *lines: str) -> None:
        with self.attempt.log_file(rank).open("a") as stream:
            stream.writelines(lines)


@pytest.fixture
def make_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trial]:
    """`make_trial(name)`: a run under ./runs with attempt 0001 of Slurm job 12."""
    monkeypatch.chdir(tmp_path)

    def make(name: str = "trial") -> Trial:
        trial = Trial(RunDir((tmp_path / "runs" / name).resolve()), time.time())
        write_json(trial.run.record, {"name": name, "topology": {"tp": 2, "pp": 2, "dp": 2}})
        trial.add_attempt("0001")
        return trial

    return make


@pytest.fixture
def trial(make_trial: Callable[..., Trial]) -> Trial:
    return make_trial()
