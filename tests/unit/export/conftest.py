"""A run of three attempts with records as two ranks write them: the second attempt does two steps again."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bigsci_launch.config.load import dump_resolved, load_run
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.runs.watching.heartbeat import Health, own_heartbeat, write_heartbeat
from bigsci_launch.runs.watching.ledger import RunFinding, raise_finding
from bigsci_launch.topology import Topology

ROOT = Path(__file__).parents[3]
TOPOLOGY = Topology(tp=1, pp=1, dp=2)
FINDING = RunFinding("slower", "s", 'since step 9, steps take 2 s\ninstead of "1 s"', time.time() - 5, "0003", step=9)


def write_steps(run: RunDir, number: int, steps: Sequence[int], **fields: float) -> None:
    """Write an attempt whose rank 1 reports steps of a second, each with a save of half a second."""
    attempt = run.attempt(f"{number:04d}")
    attempt.make()
    write_job(attempt, JobRecord("slurm", time.time() - 100, job_id=f"{number}", total_steps=20))
    attempt.config.write_text(dump_resolved(load_run(ROOT / "configs" / "demo.yaml").config))
    lines, mono = [{"kind": "start", "time": time.time(), "mono": 0.0, "step": 0}], 7.0
    for step in steps:
        for kind, more in (
            ("heartbeat", {"phase": "step"}),
            ("step", {"loss": number + step / 100, "grad_norm": 0.5, "seconds": 1.0, "tflops": 40.0, **fields}),
            ("heartbeat", {"phase": "save"}),
        ):
            lines.append({"kind": kind, "time": time.time(), "mono": mono, "step": step, **more})
            mono += 1.0 if kind == "heartbeat" and more["phase"] == "step" else 0.5 if kind == "heartbeat" else 0.0
    attempt.event_file(1).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for rank in (0, 1):
        where = {"rank": rank, "node": f"n{rank}", "coordinate": TOPOLOGY.coordinate(rank).as_dict()}
        write_json(attempt.pid_file(rank), {**where, "pid": 1, "started": time.time() - 90})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The run, with nobody who watches it."""
    found = RunDir((tmp_path / "runs" / "three").resolve())
    write_json(found.record, {"name": "three", "run_id": "abc123", "topology": TOPOLOGY.as_dict()})
    for number, steps in ((1, range(1, 7)), (2, range(5, 11)), (3, range(11, 13))):
        write_steps(found, number, steps, utilization=0.4)
    return found


def watch(run: RunDir, health: Health, *findings: RunFinding) -> None:
    """Have a watcher of this process report on the newest attempt."""
    for finding in findings:
        raise_finding(run, finding)
    fields = {"every_s": 2.0, "health": health, "sentence": "", "attempt": "0003", "may_act": False}
    write_heartbeat(run, own_heartbeat("w", **fields))
