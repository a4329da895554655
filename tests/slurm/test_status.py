"""What `bsl status` says on a real Slurm, and whose job `bsl cancel` ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.texts import has_parts

from .conftest import MakeCluster, SlurmCluster
from .test_submit import Run, write_run

pytestmark = pytest.mark.slurm
MEGATRON = Path(__file__).parent / "programs" / "megatron_lines.py"


def end(run: Run) -> None:
    job_id = json.loads((run.directory / "attempts" / "0001" / "job.json").read_text())["job_id"]
    run.cluster.run("scancel", job_id)


def processes(cluster: SlurmCluster, name: str) -> list[int]:
    """The PIDs of a cluster's daemons with this name: `slurmctld`, or a node whose slurmd shares the host."""
    records = [json.loads(line) for line in (cluster.directory / "processes.jsonl").read_text().splitlines()]
    return [record["pid"] for record in records if record["name"] == name]


def test_an_id_that_a_new_cluster_gives_again_is_anothers(make_cluster: MakeCluster, tmp_path: Path) -> None:
    first = write_run(make_cluster(nodes=1, isolated=False), tmp_path, "steps=1", name="first", nodes=1)
    job_id = first.submit()
    first.wait_for_state("COMPLETED")
    cluster = make_cluster(nodes=1, isolated=False)
    second = write_run(cluster, tmp_path, name="second", nodes=1)
    first.cluster = cluster
    assert second.submit() == job_id
    second.wait_for_ranks(num=2)

    status = first.status()["job"]
    assert (status["state"], status["source"]) == ("COMPLETED", "exit.json")
    first.bsl("cancel", str(first.directory), rc=2)
    assert has_parts(first.stderr, f"job {job_id} ", second.directory)
    assert second.status()["job"]["state"] == "RUNNING", "it must not have been ended"
    assert int(first.submit()) == int(job_id) + 1
    first.bsl("cancel", str(first.directory))
    second.bsl("cancel", str(second.directory))
    second.wait_for_state("CANCELLED")


def test_a_site_that_removes_comments(isolated_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The name, the owner and the time of submission tell a job that was not requeued. Nothing else is enough."""
    run = write_run(isolated_cluster, tmp_path, name="bare", nodes=1)
    job_id = run.submit()
    record = run.directory / "attempts" / "0001" / "job.json"
    assert json.loads(record.read_text())["cluster"] == "bsl"
    assert isolated_cluster.run("scontrol", "update", f"JobId={job_id}", "Comment=site").returncode == 0
    run.wait_for_ranks(num=2)
    assert run.status()["job"]["state"] == "RUNNING"
    true = record.read_text()
    record.write_text(json.dumps({**json.loads(true), "submitted": time.time() - 3600}))
    assert run.status()["job"]["state"] == "RUNNING"
    run.bsl("cancel", str(run.directory), rc=2)
    assert f"`scancel {job_id}`" in run.stderr
    record.write_text(json.dumps({**json.loads(true), "cluster": "another"}))
    run.bsl("cancel", str(run.directory), rc=2)
    assert has_parts(run.stderr, "cluster another", "cluster bsl")
    record.write_text(true)
    run.bsl("cancel", str(run.directory))
    run.wait_for_state("CANCELLED")


def test_a_program_of_its_own_that_prints_steps(isolated_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = write_run(isolated_cluster, tmp_path, name="megatron", nodes=2)
    run.submit("--set", f"run.command={json.dumps([sys.executable, str(MEGATRON)])}")
    run.wait_for(lambda: " iteration " in run.log(3))
    status = run.status()
    step = status["step"]
    assert (step["source"], step["seconds"], step["loss"], step["total_steps"]) == ("log", 0.2, 4.531072, 100)
    assert step["age_s"] < 20 and status["last_output"]["rank"] == 3 and status["slowest_rank"] is None
    for path in (run.directory / "attempts" / "0001" / "logs").glob("rank-000[0-2].log"):
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    text = run.bsl("status", str(run.directory))
    assert "last output" in text and "rank 3 (dp1 pp0 tp1) on n1" in text and "bsl spy" not in text
    end(run)


def test_a_waiting_job_says_why_and_what_to_do(isolated_cluster: SlurmCluster, tmp_path: Path) -> None:
    runs = [write_run(isolated_cluster, tmp_path, name=name, nodes=4) for name in ("busy", "waits")]
    busy, waits = runs
    busy.submit()
    busy.wait_for_ranks(num=8)
    job_id = waits.submit()
    waits.wait_for(lambda: waits.status()["job"]["reason"] in ("Resources", "Priority"))
    text = waits.bsl("status", str(waits.directory))
    assert has_parts(text, "waits because", "waits for")
    waits.wait_for(lambda: waits.status()["job"]["expected_start"] is not None)
    assert "Slurm's estimate" in waits.bsl("status", str(waits.directory))
    assert isolated_cluster.run("scontrol", "uhold", job_id).returncode == 0
    job = waits.status()["job"]
    assert (job["reason"], job["started"]) == ("JobHeldUser", None) and job["meaning"]
    assert 0 <= time.time() - job["submitted"] < 120
    assert waits.bsl("status", str(waits.directory)).splitlines()[-1] == f"next: scontrol release {job_id}"
    for run in runs:
        end(run)


def test_a_silent_controller_ends_no_run(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(nodes=1, isolated=False)
    run = write_run(cluster, tmp_path, name="run", nodes=1)
    run.submit()
    run.wait_for_ranks(num=2)
    conf = cluster.slurm_conf.read_text()
    assert "MessageTimeout=20\n" in conf, "each command of Slurm would wait so long for the controller"
    cluster.slurm_conf.write_text(conf.replace("MessageTimeout=20\n", "MessageTimeout=2\n"))
    [controller] = processes(cluster, "slurmctld")
    os.kill(controller, signal.SIGKILL)
    text = run.bsl("status", str(run.directory))
    assert "UNKNOWN (squeue: " in text
    assert "ended" not in text and "died" not in text
    assert "2 of 2 started" in text and "last output" in text
    run.bsl("cancel", str(run.directory), rc=2)
    assert "was not cancelled" in run.stderr


@pytest.fixture
def stopped_daemons() -> Any:
    """PIDs of stopped daemons, which continue after the test."""
    stopped: list[int] = []
    yield stopped
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# tests/unit/runs/test_status.py holds the same claim with sinfo's recorded words.
@pytest.mark.long
def test_a_slurmd_that_does_not_answer_is_no_lost_node(
    make_cluster: MakeCluster, tmp_path: Path, stopped_daemons: list[int]
) -> None:
    cluster = make_cluster(nodes=2, isolated=False)
    conf = cluster.slurm_conf.read_text()
    assert "SlurmdTimeout=10\n" in conf, "the cluster would give the node up before anybody can look"
    cluster.slurm_conf.write_text(conf.replace("SlurmdTimeout=10\n", "SlurmdTimeout=60\n"))
    assert cluster.run("scontrol", "reconfigure").returncode == 0
    run = write_run(cluster, tmp_path, name="run", nodes=2)
    run.submit()
    run.wait_for_ranks(num=4)
    [slurmd] = processes(cluster, "n1")
    assert Path(f"/proc/{slurmd}/comm").read_text() == "slurmd\n"
    os.kill(slurmd, signal.SIGSTOP)
    stopped_daemons.append(slurmd)
    texts: list[str] = []

    def is_seen() -> bool:
        texts.append(run.bsl("status", str(run.directory)))
        return "n1 does not respond" in texts[-1]

    run.wait_for(is_seen)
    assert has_parts(texts[-1], "(mixed*)", "slurmd")
    assert "lost node" not in texts[-1] and "bsl cancel" not in texts[-1]
