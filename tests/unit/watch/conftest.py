"""A watcher with a clock of its own, and log events as readers make them. And a run of two attempts
with records as ranks write them: the second repeats some steps, and its loss jumps."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import AttemptDir, RunDir, write_json
from bigsci_launch.topology import Topology
from bigsci_launch.watch.judge.log_event import LogEvent
from bigsci_launch.watch.judge.progress import ProgressTracker
from bigsci_launch.watch.judge.silence import Noticed, Silence
from bigsci_launch.watch.judge.state import Expected
from tests.support.generation_records import GenerationRecords

STEP_S = 100.0


@dataclass
class Watched:
    """A tracker, and the time by the watcher's clock."""

    tracker: ProgressTracker
    now: float = 5000.0
    noticed: list[Noticed] = field(default_factory=list)

    def see(self, *log_events: LogEvent, after: float = 0.0) -> None:
        self.now += after
        self.tracker.take(log_events, self.now)
        self.noticed += self.tracker.noticed()

    def silent(self, seconds: float) -> Silence:
        """What is said after so many seconds without anything new."""
        return self.tracker.silence(self.now + seconds)

    def steps(self, first: int, last: int, seconds: float = STEP_S) -> None:
        for step in range(first, last + 1):
            self.see(LogEvent("step", step=step, seconds=seconds), after=seconds)


@pytest.fixture
def watch() -> Callable[..., Watched]:
    def start(**expected: float) -> Watched:
        return Watched(ProgressTracker(Expected(**expected)))  # type: ignore[arg-type]

    return start


TOPOLOGY = Topology(tp=4, pp=12, dp=8)


def write_steps(attempt: AttemptDir, steps: Sequence[int], loss: Callable[[int], float]) -> None:
    """Write the records of the rank that reports steps."""
    lines = []
    for step in steps:
        common = {"time": time.time(), "mono": 1.0, "step": step}
        lines.append(json.dumps({"kind": "heartbeat", **common, "phase": "step"}))
        fields = {"loss": loss(step), "grad_norm": 0.3, "seconds": 105.0 + step % 2, "tflops": 150.0}
        lines.append(json.dumps({"kind": "step", **common, **fields}))
    attempt.event_file(TOPOLOGY.world_size - 1).write_text("\n".join(lines) + "\n")


@pytest.fixture
def bloom(tmp_path: Path) -> RunDir:
    run = RunDir((tmp_path / "runs" / "bloom").resolve())
    write_json(run.record, {"name": "bloom", "topology": TOPOLOGY.as_dict()})
    for number, steps in ((1, range(1, 61)), (2, range(51, 101))):
        attempt = run.attempt(f"{number:04d}")
        attempt.make()
        write_job(attempt, JobRecord("slurm", time.time() - 100, job_id=f"1{number}", total_steps=200))
        write_steps(attempt, steps, lambda step, number=number: 6.0 - step / 50 + step % 3 * 0.01 + (number - 1) * 0.9)
    write_json(run.attempt("0001").exit, {"reason": "time_limit", "exit_code": 0, "first_failure": None})
    for rank in range(TOPOLOGY.world_size):
        identity = {"rank": rank, "node": f"n{rank // 4}", "coordinate": TOPOLOGY.coordinate(rank).as_dict()}
        attempt = run.attempt("0002")
        # 384 files that are synced take seconds.
        attempt.pid_file(rank).write_text(json.dumps({**identity, "pid": 1, "started": time.time() - 90}))
        if rank != TOPOLOGY.world_size - 1:
            heartbeat(attempt, rank, "step", 0)
    return run


def lose_a_node(run: RunDir) -> GenerationRecords:
    """Have node n5 of the newest attempt lost, and its ranks replaced by those of a spare node."""
    found = GenerationRecords(run.attempt("0002"), time.time() - 300)
    nodes = [f"n{rank // 4}" for rank in range(TOPOLOGY.world_size)]
    found.begins(TOPOLOGY, nodes, ["n96"])
    found.comes_back(50, "checkpoint", joined=20.0, restored=30.0, first=140.0)
    found.clock += 200
    found.fails("lost_node", 20, "n5", noticed_s=None)
    found.ends(72, 3.0)
    found.write("left_out", node="n5", reason="lost", until=None)
    found.begins(TOPOLOGY, ["n96" if node == "n5" else node for node in nodes])
    found.comes_back(72, "buddies", joined=1.0, restored=2.5, first=92.0)
    return found


def heartbeat(attempt: AttemptDir, rank: int, phase: str, age_s: float) -> None:
    """Write the newest heartbeat of a rank."""
    record = {"kind": "heartbeat", "time": time.time() - age_s, "mono": 1.0, "step": 100, "phase": phase}
    attempt.event_file(rank).write_text(json.dumps(record) + "\n")
    os.utime(attempt.event_file(rank), (time.time() - age_s, time.time() - age_s))
