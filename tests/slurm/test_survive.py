"""A job that survives: a foreign program loses a node, or a rank, and the same job finishes.

All runs share one cluster, which loses nodes, and wait for Slurm and for each other's processes at the same time.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigsci_launch.data.indexed import IndexedWriter
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import RunDir, node_memory
from tests.support.listening import Listener, allowed_places, listeners, processes_of, table

from .conftest import SlurmCluster, _start, _stop
from .test_submit import MODEL, PROGRAM, Run

pytestmark = pytest.mark.slurm
DDP = Path(__file__).parent / "programs" / "ddp_loop.py"


@pytest.fixture(scope="module")
def cluster(slurm_packages: None) -> Iterator[SlurmCluster]:
    made = _start(6, 2, isolated=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(made.slurm_conf))
        yield made
    _stop(made)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bsl-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@dataclass(frozen=True)
class Loss:
    """A run that has just lost a node, which Slurm notices half a minute later. Until then, other tests run.

    Its last step waits for the file `noticed`.
    """

    run: Run
    victim: str
    listening: list[Listener]
    """Where the processes of the cluster and of the run have listened before."""


@pytest.fixture(scope="module")
def lost_node(cluster: SlurmCluster, folder: Path) -> Loss:
    """2 nodes and a spare one; the second is killed after some steps."""
    run = write_survivor(
        cluster, folder, "ddp", sys.executable, str(DDP), "60", "0.1", str(folder / "noticed"), nodes=2, spare_nodes=1
    )
    run.submit()
    run.wait_for(lambda: "step 12 " in run.log(3), timeout_s=240)  # four ranks import torch
    listening = listeners(processes_of(cluster.directory, run.directory))
    victim = nodes_of(events(run, "began")[0])[3]
    assert cluster.bsl("cluster", "kill-node", victim).returncode == 0
    return Loss(run, victim, listening)


def write_survivor(cluster: Any, folder: Path, name: str, *command: str, **slurm: Any) -> Run:
    folder = folder / name
    folder.mkdir()
    config = {
        "run": {"name": name, "root": "runs", "command": list(command)},
        "slurm": {"site": "minicluster", "time_limit": "00:10:00", **slurm},
        "model": MODEL,
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 4},
        "monitor": {"step_time_s": 1, "save_time_s": 1, "watch": "off"},
        "env": {"RES_OPTIONS": {"value": "attempts:1 timeout:1", "reason": "no name server answers in a node"}},
        "survive": True,
        "data": {"prefix": "none"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    return Run(cluster, folder, path, (folder / "runs" / name).resolve())


def ranks_of(cluster: Any, folder: Path, name: str, *words: str, **slurm: Any) -> Run:
    """Start two ranks on each node that need no torch."""
    run = write_survivor(cluster, folder, name, sys.executable, str(PROGRAM), *words, **slurm)
    run.submit()
    run.wait_for_ranks(num=2 * slurm["nodes"])
    return run


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [record for record in all_events(run) if record["event"] == kind]


def all_events(run: Run) -> list[dict[str, Any]]:
    path = run.directory / "attempts" / "0001" / "recover" / "generations.jsonl"
    return list(map(json.loads, path.read_text().splitlines() if path.exists() else []))


def nodes_of(began: dict[str, Any]) -> list[str]:
    return [member["node"] for member in began["members"]]


def kill_rank(run: Run, rank: int, which: str = "pid") -> None:
    """KILL a rank on its node, or its runner. The processes of a node have numbers of their own."""
    attempt = run.directory / "attempts" / "0001"
    record = json.loads((attempt / "pids" / f"rank-{rank:04d}.json").read_text())
    step = ("srun", "--overlap", f"--jobid={record['job_id']}", f"--nodelist={record['node']}", "-N1", "-n1")
    done = run.cluster.run(*step, "--gres=gpu:0", "kill", "-9", str(record[which]))
    assert done.returncode == 0, done.stderr


ROWS = (
    ("bigsci_launch.recover.controller", "controller of `survive`", "otherwise"),
    ("srun ", "`srun` of a step", ""),
    ("slurmctld", "`bsl cluster`", "slurmctld and slurmd"),
    ("slurmd ", "`bsl cluster`", "slurmctld and slurmd"),
    ("munged", "`bsl cluster`", "munge and the steps"),
    ("slurmstepd", "`bsl cluster`", "munge and the steps"),
)
"""What the command of a process holds, its row in the table of ports, and which of its clauses."""


def row_of(listener: Listener) -> tuple[str, str]:
    if str(DDP) in listener.command and "rank_runner.py" not in listener.command:
        return ("torch's store" if "everywhere" in listener.kinds else "gloo"), ""
    return next((row, clause) for words, row, clause in ROWS if words in listener.command)


def test_a_job_and_its_cluster_listen_where_security_md_says(lost_node: Loss) -> None:
    ports, seen = table("Which port listens, where and when"), set()
    for listener in lost_node.listening:
        row, clause = row_of(listener)
        seen.add((row, clause))
        assert listener.kinds & allowed_places(ports, row, clause), (listener, row)
        assert row in ("torch's store", "gloo") or "loopback" not in listener.kinds, listener
    assert seen == {(row, clause) for _, row, clause in ROWS} | {("torch's store", ""), ("gloo", "")}


def test_a_killed_rank_starts_again_where_it_was_and_a_cancelled_job_does_not(
    lost_node: Loss, cluster: SlurmCluster, folder: Path
) -> None:
    run = ranks_of(cluster, folder, "cancelled", nodes=1)
    kill_rank(run, 1)
    run.wait_for(lambda: run.log(0).count("iteration 1\n") == 2 and run.log(1).count("iteration 1\n") == 2)
    [first, second] = events(run, "began")
    assert nodes_of(first) == nodes_of(second)
    [failed] = events(run, "failed")
    assert (failed["kind"], failed["rank"], failed["signal"]) == ("died", 1, "SIGKILL")
    run.bsl("cancel", str(run.directory))
    run.wait_for_state("CANCELLED")
    assert run.exit()["reason"] == "cancelled"
    assert len(events(run, "began")) == 2 and len(events(run, "failed")) == 1


def test_the_warning_before_the_time_limit_reaches_the_ranks(
    lost_node: Loss, cluster: SlurmCluster, folder: Path
) -> None:
    run = ranks_of(cluster, folder, "stopped", "stop-on-usr2", nodes=1)
    assert cluster.run("scancel", "--signal=USR2", "--batch", run.status()["job"]["job_id"]).returncode == 0
    run.wait_for_state("COMPLETED")
    assert (run.exit()["reason"], run.exit()["exit_code"]) == ("stopped", 0)
    assert "asked to stop" in run.log(0) and "asked to stop" in run.log(1)


def test_a_killed_node_is_replaced_and_the_job_finishes(lost_node: Loss, folder: Path) -> None:
    """The step outlives what Slurm does about the node."""
    run, victim = lost_node.run, lost_node.victim
    state = ("sinfo", "-h", "-n", victim, "-o", "%T")
    run.wait_for(lambda: run.cluster.run(*state).stdout.startswith("down") and len(events(run, "began")) == 2)
    (folder / "noticed").touch()
    status = run.wait_for_state("COMPLETED", timeout_s=300)
    job_id = status["job"]["job_id"]
    assert (run.exit()["reason"], run.exit()["exit_code"], run.exit()["job_id"]) == ("finished", 0, job_id)
    assert run.output().count("start attempt=0001 job=") == 1, "Slurm has started it once"
    first, second = events(run, "began")
    assert nodes_of(second)[:2] == nodes_of(first)[:2] and victim not in nodes_of(second)
    assert second["world_size"] == 4
    failed = events(run, "failed")[0]
    assert (failed["kind"], failed["node"]) == ("lost_node", victim)
    assert [event["exit_code"] for event in events(run, "finished")] == [0]
    assert all("ends at step 60" in run.log(rank) for rank in range(4))
    printed = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss (\S+)", run.log(0))]
    assert sorted(dict(printed)) == list(range(1, 61)), "every step was made, some of them twice"
    # Not bit for bit: DistributedDataParallel orders its buckets anew after the first step.
    assert [loss for _, loss in printed] == pytest.approx([dict(printed)[step] for step, _ in printed], rel=1e-4)


@pytest.mark.long
def test_the_trainer_loses_a_node_and_its_losses_are_those_of_an_undisturbed_run(
    cluster: SlurmCluster, folder: Path
) -> None:
    """pp 2 x dp 2 on two nodes and a spare one; the second node has both replicas of the last stage."""
    with IndexedWriter(folder / "tokens", np.dtype(np.uint16)) as writer:
        writer.add_document(np.random.default_rng(0).integers(90, size=20_000))
    run = write_training(cluster, folder, "trained", survive=True)
    run.submit()
    run.wait_for(lambda: "standby" in [event["phase"] for event in events(run, "phase")])
    victim = nodes_of(events(run, "began")[0])[3]
    assert cluster.bsl("cluster", "kill-node", victim).returncode == 0
    run.wait_for_state("COMPLETED", timeout_s=200)
    assert (run.exit()["reason"], run.exit()["exit_code"]) == ("finished", 0)
    assert [event["node"] for event in events(run, "failed") if event["kind"] == "lost_node"] == [victim] * 2
    assert events(run, "phase")[-1]["phase"] in ("first_step", "standby")
    restored = [event for event in events(run, "phase") if event["phase"] == "restored"][-1]
    assert restored["source"] == "buddies" and restored["step"] > 0
    sound = write_training(cluster, folder, "sound")
    sound.submit()
    sound.wait_for_state("COMPLETED")
    assert losses_of(run) == losses_of(sound)


def write_training(cluster: Any, folder: Path, name: str, **more: Any) -> Run:
    nodes = {"nodes": 2, **({"spare_nodes": 1} if more else {})}
    run = write_survivor(cluster, folder, name, **nodes)
    config = json.loads(run.config.read_text())
    del config["survive"], config["run"]["command"]
    config["model"] = {**MODEL, "vocab_size": 100, "sequence_length": 16, "dropout": 0.1}
    config["training"] = {"steps": 150, "micro_batch_size": 1, "global_batch_size": 8, "precision": "bf16"}
    config["parallelism"] = {"pipeline_parallel_size": 2}
    config["data"] = {"prefix": str(folder / "tokens")}
    run.config.write_text(json.dumps({**config, **more}))
    return run


def losses_of(run: Run) -> dict[int, str]:
    """Return the loss of each step, bit for bit; the last one of a step that was made again."""
    attempt = RunDir(run.directory).attempt("0001")
    records = [each for rank in range(4) for each in read_events(attempt.event_file(rank)) if each["kind"] == "step"]
    return {each["step"]: each["loss_hex"] for each in sorted(records, key=lambda each: each["time"])}


@pytest.mark.long
@pytest.mark.parametrize("pause_s", [18.0, 40.0])
def test_a_suspended_job_loses_no_node(pause_s: float, cluster: SlurmCluster, folder: Path) -> None:
    name = f"suspended{pause_s:.0f}"
    run = ranks_of(cluster, folder, name, "stop-on-usr2", nodes=2)
    job_id = run.status()["job"]["job_id"]
    assert cluster.run("scontrol", "suspend", job_id).returncode == 0
    time.sleep(pause_s)
    assert cluster.run("scontrol", "resume", job_id).returncode == 0
    time.sleep(5.0)
    assert cluster.run("scancel", "--signal=USR2", "--batch", job_id).returncode == 0
    run.wait_for_state("COMPLETED")
    assert (run.exit()["reason"], run.exit()["exit_code"]) == ("stopped", 0)
    assert [record["event"] for record in all_events(run)] == ["began", "finished"]
    assert not node_memory(run.directory.parent).exists(), "no node is left out"


@pytest.mark.long
def test_a_killed_runner_is_started_again_on_its_node(cluster: SlurmCluster, folder: Path) -> None:
    """Slurm does not know the new one as a task, and its signals reach it all the same."""
    run = ranks_of(cluster, folder, "agents", "stop-on-usr2", nodes=2)
    kill_rank(run, 3, "runner_pid")
    run.wait_for(lambda: all(run.log(rank).count("iteration 1\n") == 2 for rank in range(4)))
    first, second = events(run, "began")
    assert nodes_of(second) == nodes_of(first)
    assert cluster.run("scancel", "--signal=USR2", "--batch", run.status()["job"]["job_id"]).returncode == 0
    run.wait_for_state("COMPLETED")
    assert (run.exit()["reason"], run.exit()["exit_code"]) == ("stopped", 0)
    assert [(each["kind"], each["rank"]) for each in events(run, "failed")] == [("lost_runner", 3)]
    assert not events(run, "left_out") and not node_memory(run.directory.parent).exists()


@pytest.mark.long
def test_a_lost_batch_host_ends_the_job(cluster: SlurmCluster, folder: Path) -> None:
    """With --no-kill, Slurm itself would leave it RUNNING until its time limit."""
    run = ranks_of(cluster, folder, "headless", nodes=2)
    [first] = events(run, "began")
    assert cluster.bsl("cluster", "kill-node", nodes_of(first)[0]).returncode == 0
    status = run.wait_for_state("CANCELLED")
    assert status["exit"]["reason"] == "node_failure"
    assert status["exit"]["first_failure"]["node"] == nodes_of(first)[0]
    assert "lost" in run.log(2)


@pytest.mark.long
def test_without_a_spare_node_the_reason_is_the_lost_one(cluster: SlurmCluster, folder: Path) -> None:
    run = write_survivor(cluster, folder, "short", sys.executable, str(PROGRAM), nodes=2)
    config = json.loads(run.config.read_text())
    run.config.write_text(json.dumps({**config, "survive": {"shrink": False}}))
    run.submit()
    run.wait_for_ranks(num=4)
    [first] = events(run, "began")
    victim = nodes_of(first)[3]
    assert cluster.bsl("cluster", "kill-node", victim).returncode == 0
    run.wait_for_state("FAILED")
    assert (run.exit()["reason"], run.exit()["first_failure"]["node"]) == ("node_failure", victim)
    [gave_up] = events(run, "gave_up")
    assert gave_up["exit_code"] == run.exit()["exit_code"] != 0
