"""A job that survives: a foreign program loses a node, or a rank, and the same job finishes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import MakeCluster
from .test_submit import MODEL, Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
DDP = Path(__file__).parent / "programs" / "ddp_loop.py"


def write_survivor(cluster: Any, folder: Path, *words: str, name: str = "run", **slurm: Any) -> Run:
    """Write a run of 2 nodes x 2 ranks and a spare node; its program is a loop of torchrun's kind."""
    folder = folder / name
    folder.mkdir()
    config = {
        "run": {"name": name, "root": "runs", "command": [sys.executable, str(DDP), *words]},
        "slurm": {"site": "minicluster", "nodes": 2, "spare_nodes": 1, "time_limit": "00:10:00", **slurm},
        "model": MODEL,
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 4},
        "monitor": {"step_time_s": 1, "save_time_s": 1, "watch": "off"},
        "survive": True,
        "data": {"prefix": "none"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    return Run(cluster, folder, path, (folder / "runs" / name).resolve())


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    path = run.directory / "attempts" / "0001" / "recover" / "generations.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["event"] == kind]


def losses(run: Run, rank: int) -> Iterator[tuple[int, str]]:
    return ((int(step), loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", run.log(rank)))


def pid_record(run: Run, rank: int) -> dict[str, Any]:
    return json.loads((run.directory / "attempts" / "0001" / "pids" / f"rank-{rank:04d}.json").read_text())


def test_a_killed_node_is_replaced_and_the_job_finishes(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(nodes=3)
    run = write_survivor(cluster, tmp_path, "60", "0.1")
    job_id = run.submit()
    run.wait_for(lambda: "step 12 " in run.log(3))
    assert pid_record(run, 2)["node"] == "n1"
    assert cluster.bsl("cluster", "kill-node", "n1").returncode == 0
    status = run.wait_for_state("COMPLETED", timeout_s=90)
    assert status["job"]["id"] == job_id
    assert (run.exit()["reason"], run.exit()["exit_code"], run.exit()["job_id"]) == ("finished", 0, job_id)
    [first, second] = events(run, "began")
    assert [member["node"] for member in first["members"]] == ["n0", "n0", "n1", "n1"]
    assert [member["node"] for member in second["members"]] == ["n0", "n0", "n2", "n2"]
    failed = events(run, "failed")[0]
    assert (failed["kind"], failed["node"]) == ("lost_node", "n1")
    assert [event["exit_code"] for event in events(run, "finished")] == [0]
    assert all("ends at step 60" in run.log(rank) for rank in range(4))
    printed = list(losses(run, 0))
    assert len(printed) > len(dict(printed)) == 60, "some steps were replayed"
    assert len(set(printed)) == 60, "with the same losses"
