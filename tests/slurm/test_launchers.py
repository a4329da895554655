"""`slurm.ranks_per_task` on a real Slurm: one launcher on each of two nodes, whose two workers are ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import run_bsl
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slurm
LAUNCH = (sys.executable, str(Path(__file__).parents[1] / "process" / "programs" / "launch_workers.py"))
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")),)
PLAIN = """
import os, signal, sys, time
RANK = int(os.environ["RANK"])
signal.signal(signal.SIGUSR2, lambda *_: (print("asked", flush=True), sys.exit(0)))
print("up", flush=True)
if "raise" in sys.argv and RANK == 3:
    raise ValueError("no such shard")
"""
GLOO = """
import sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK, total = dist.get_rank(), torch.ones(1)
print("up", flush=True)
for step in range(1, 4):
    dist.all_reduce(total)
    if RANK == 0:
        print(f" iteration {step:8d}/{3:8d} | lm loss: {3 / step:.6E} |", flush=True)
def load_batch():
    print("hangs", flush=True)
    time.sleep(600)
if sys.argv[1] == "hang":
    load_batch() if RANK == 3 else dist.barrier()
dist.destroy_process_group()
"""
NODES = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}


class LaunchedJob:
    """A run of 2 nodes x 2 ranks."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.directory = folder / "runs" / "run"
        self.attempt = self.directory / "attempts" / "0001"
        self.job = ""

    def bsl(self, *words: str, rc: int = 0) -> str:
        done = run_bsl(self.folder, *words, rc=rc, environment=self.cluster.environment())
        return done.stdout

    def submit(self, launcher: tuple[str, ...], program: str, *words: str, **slurm: Any) -> None:
        (self.folder / "train.py").write_text(program)
        config = {
            "run": {"name": "run", "command": [*launcher, "train.py", *words]},
            "slurm": {"site": "minicluster", "nodes": 2, "ranks_per_task": 2, "time_limit": "00:10:00", **slurm},
            "parallelism": {"tensor_parallel_size": 2},
        }
        (self.folder / "run.yaml").write_text(json.dumps(config))
        self.job = self.bsl("submit", "run.yaml").strip()

    def record(self, name: str) -> Any:
        return json.loads((self.attempt / f"{name}.json").read_text())

    def log(self, name: str) -> str:
        path = self.attempt / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, word: str, *ranks: int) -> None:
        wait_until(
            lambda: all(word in self.log(f"rank-{rank:04d}") for rank in ranks),
            evidence=lambda: (self.log("launcher-0000"), self.log("launcher-0001"), self.bsl("status", "run")),
        )

    def wait_for_end(self) -> Any:
        wait_until(
            lambda: (self.attempt / "exit.json").exists() and self.record("exit")["exit_code"] is not None,
            evidence=lambda: (self.log("launcher-0000"), self.log("launcher-0001"), self.bsl("status", "run")),
        )
        return self.record("exit")

    def on_node(self, node: str, *command: str) -> None:
        argv = ["srun", "--overlap", f"--jobid={self.job}", "--gres=gpu:0", "-N1", "-n1", "-w", node, *command]
        assert self.cluster.run(*argv).returncode == 0


@pytest.fixture
def run(isolated_cluster: Any, tmp_path: Path) -> Iterator[LaunchedJob]:
    run = LaunchedJob(isolated_cluster, tmp_path)
    yield run
    isolated_cluster.run("scancel", run.job)


def first_failure(ended: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(ended["first_failure"][name] for name in ("rank", "node", "signal", "code"))


# A rank that hangs, and the request to stop, are below.
@pytest.mark.long
@pytest.mark.torch
def test_torchrun_on_each_node_joins_and_ends(run: LaunchedJob) -> None:
    run.submit(TORCHRUN, GLOO, "end")
    ended = run.wait_for_end()
    assert (ended["reason"], ended["exit_code"], ended["num_started"], ended["world_size"]) == ("finished", 0, 4, 4)


def test_a_rank_that_raises_is_named_with_its_node(run: LaunchedJob) -> None:
    run.submit(LAUNCH, f"{PLAIN}time.sleep(600)\n", "raise")
    ended = run.wait_for_end()
    assert (ended["reason"], first_failure(ended)) == ("crashed", (3, "n1", None, 1))
    assert has_parts(ended["first_failure"]["error"], "no such shard")
    assert ended["first_failure"]["coordinate"] == {"pp": 0, "tp": 1, "dp": 1}
    for verb in ("status", "why"):
        assert has_parts(run.bsl(verb, "run"), "rank 3 (dp1 pp0 tp1) on n1", "no such shard")


@pytest.mark.torch
def test_workers_of_torchrun_on_each_node_are_the_ranks_and_one_that_hangs_is_named(run: LaunchedJob) -> None:
    run.submit(TORCHRUN, GLOO, "hang")
    run.wait_for("hangs", 3)
    status = json.loads(run.bsl("status", "run", "--json"))
    assert (status["num_ranks_started"], status["step"]["step"], status["step"]["total_steps"]) == (4, 3, 3)
    assert {rank: run.record(f"pids/rank-{rank:04d}")["node"] for rank in range(4)} == NODES
    assert [run.record(f"pids/rank-{rank:04d}")["local_rank"] for rank in range(4)] == [0, 1, 0, 1]
    labels = {line.split("[")[1].split("]")[0] for line in run.bsl("logs", "run", "--grep", "up").splitlines()}
    assert labels == {f"n{rank // 2} rank {rank} dp{rank // 2} pp0 tp{rank % 2}" for rank in range(4)}
    spied = json.loads(run.bsl("spy", "run", "--json"))
    assert {each["rank"]: each["node"] for each in spied["ranks"]} == NODES
    assert {each["numbered_by"] for each in spied["ranks"]} == {"pid file"}
    [first] = spied["verdict"]["look_first"]
    assert (first["rank"], first["node"], first["pid"]) == (3, "n1", run.record("pids/rank-0003")["pid"])
    assert has_parts(first["why"], "load_batch")
    run.bsl("cancel", "run")
    assert run.wait_for_end()["reason"] == "cancelled"
    assert sorted(each.stem for each in (run.attempt / "rings").glob("*.ring")) == [
        f"rank-{rank:04d}" for rank in range(4)
    ]


def test_the_request_to_stop_reaches_each_worker(run: LaunchedJob) -> None:
    run.submit(LAUNCH, f"{PLAIN}time.sleep(600)\n")
    run.wait_for("up", 0, 1, 2, 3)
    assert run.cluster.run("scancel", "--signal=URG", run.job).returncode == 0
    run.wait_for("asked", 0, 1, 2, 3)
    assert run.wait_for_end()["exit_code"] == 0
    assert "first [0, 0] then [0, 0]" in run.log("launcher-0001")


def test_a_launcher_that_is_killed_is_named_with_its_node(run: LaunchedJob) -> None:
    run.submit(LAUNCH, f"{PLAIN}time.sleep(600)\n")
    run.wait_for("up", 0, 1, 2, 3)
    run.on_node("n1", "kill", "-KILL", str(run.record("pids/launcher-0001")["pid"]))
    ended = run.wait_for_end()
    assert (ended["reason"], ended["first_failure"], ended["exit_code"]) == ("crashed", None, 137)
    assert has_parts(ended["cause"], "launcher 1 on n1", "SIGKILL")


def test_ranks_that_run_long_after_the_others_are_those_of_their_launcher(run: LaunchedJob) -> None:
    run.submit(LAUNCH, f"{PLAIN}time.sleep(600 if RANK > 1 else 0)\n", wait_s=2)
    ended = run.wait_for_end()
    assert (ended["reason"], ended["failed_ranks"]) == ("left_early", [0, 1])
    assert ended["first_failure"]["node"] == "n0"
