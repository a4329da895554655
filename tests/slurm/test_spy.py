"""`bsl spy --jobid` on a real Slurm: unprepared jobs and jobs of bsl, hung in one place, with lost nodes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.layout import RunDir
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

from .conftest import MakeCluster, SlurmCluster
from .spied_jobs import Jobs, hung_processes, ready, suspect

pytestmark = pytest.mark.slurm
PROGRAMS = Path(__file__).parents[1] / "process" / "programs"
CONFIG = Path(__file__).parents[2] / "configs" / "minicluster.yaml"
TAGS = """
import pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
pathlib.Path("{folder}", f"ready-{{dist.get_rank()}}").touch()
if dist.get_rank() == 0: dist.recv(torch.zeros(3), 3, tag=8)
if dist.get_rank() == 3: dist.send(torch.zeros(3), 0, tag=7)
dist.barrier()
"""
TOPOLOGY = ("--topology", "tp=2,pp=2,dp=2")


@pytest.fixture
def jobs(isolated_cluster: SlurmCluster, tmp_path: Path) -> Jobs:
    return Jobs(isolated_cluster, tmp_path)


def test_a_plain_job_with_one_task_per_rank_below_a_shell(jobs: Jobs) -> None:
    command = hung_processes(jobs.folder, 5)
    job = jobs.submit(f"srun --gres=gpu:2 bash -c '{command}; true'", "-N4", "--ntasks-per-node=2", "--gres=gpu:2")
    wait_until(ready(jobs.folder, 8))
    document = jobs.spy(job, *TOPOLOGY)
    found = suspect(document)
    assert (found["rank"], found["node"], found["coordinate"]) == (5, "n2", {"pp": 1, "tp": 1, "dp": 0})
    coverage = document["coverage"]
    assert (coverage["ranks_read"], coverage["ranks_unreadable"], coverage["nodes_silent"]) == (8, [], [])
    assert document["job"] == job
    assert [(entry["ranks"], entry["nodes"]) for entry in document["classes"]] == [
        ([0, 1, 2, 3, 4, 6, 7], ["n0", "n1", "n2", "n3"]),
        ([5], ["n2"]),
    ]
    jobs.cancel(job)
    refused = jobs.cluster.bsl("spy", "--jobid", job)
    assert refused.returncode in (3, 4) and has_parts(refused.stderr, f"job {job}")


def test_a_plain_job_with_one_launcher_per_node(jobs: Jobs) -> None:
    """Like torchrun: the task of a node starts the node's ranks and sets their RANK."""
    command = hung_processes(jobs.folder, 6, "stop_here")
    start = f"for i in 0 1; do RANK=$((SLURM_PROCID * 2 + i)) WORLD_SIZE=8 {command} & done; wait"
    job = jobs.submit(f"srun bash -c '{start}'", "-N4", "--ntasks-per-node=1")
    wait_until(ready(jobs.folder, 8))
    document = jobs.spy(job, *TOPOLOGY)
    found = suspect(document)
    assert (found["rank"], found["node"], found["coordinate"]) == (6, "n3", {"pp": 1, "tp": 0, "dp": 1})
    assert document["verdict"]["class"] == "H55"
    wake = document["verdict"]["next"][0]
    assert wake == f"srun --overlap --jobid={job} --gres=gpu:0 -N1 -n1 -w n3 kill -CONT {found['pid']}"
    assert jobs.cluster.run("sh", "-c", wake).returncode == 0
    look = wake.replace("kill -CONT", "test -d /proc/")
    wait_until(lambda: jobs.cluster.run("sh", "-c", look.replace("proc/ ", "proc/")).returncode != 0)
    jobs.cancel(job)


def test_a_job_of_bsl_with_a_program_of_its_own(jobs: Jobs) -> None:
    """The ranks are found through the run's pid files; the coordinates come from the run."""
    words = hung_processes(jobs.folder, 2).split()
    settings = ("run.name=stuck", f"run.root={jobs.folder}", f"run.command={json.dumps(words)}")
    done = jobs.cluster.bsl("submit", str(CONFIG), *(word for value in settings for word in ("--set", value)))
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    wait_until(ready(jobs.folder, 8))
    found = suspect(jobs.spy(job))
    assert (found["rank"], found["node"], found["coordinate"]) == (2, "n1", {"pp": 0, "tp": 0, "dp": 1})
    by_name = jobs.cluster.bsl("spy", str(jobs.folder / "stuck"))
    assert by_name.stdout.startswith("rank 2 (n1, dp1 pp0 tp0) sleeps in load_batch"), by_name.stderr
    assert list(RunDir(jobs.folder / "stuck").bundles.iterdir())
    jobs.cancel(job)
    for words in ([str(jobs.folder / "stuck")], ["--jobid", job]):
        after = json.loads(jobs.cluster.bsl("spy", *words, "--json").stdout)
        assert (after["kind"], after["about"]) == ("cancelled", "run stuck"), after


SHELL = "{python} {program}"
TORCHRUN = (
    "exec {python} -m torch.distributed.run --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d "
    "--rdzv-endpoint $MASTER_ADDR:$MASTER_PORT {program}"
)
"""Which worker gets which rank is not the order of the tasks."""


@pytest.mark.torch
@pytest.mark.parametrize("how", [SHELL, pytest.param(TORCHRUN, marks=pytest.mark.long)], ids=["shell", "torchrun"])
def test_the_rings_of_a_program_of_its_own_are_read_on_its_nodes_and_outlive_it(jobs: Jobs, how: str) -> None:
    (jobs.folder / "train.py").write_text(TAGS.format(folder=jobs.folder))
    run, line = jobs.folder / "tags", how.format(python=sys.executable, program=jobs.folder / "train.py")
    settings = ["run.name=tags", f"run.root={jobs.folder}", f"run.command={json.dumps(['bash', '-c', line])}"]
    settings += ["slurm.nodes=2", "parallelism.pipeline_parallel_size=1"]
    done = jobs.cluster.bsl("submit", str(CONFIG), *(word for value in settings for word in ("--set", value)))
    assert done.returncode == 0, done.stderr
    wait_until(ready(jobs.folder, 4))
    time.sleep(1.0)

    def said() -> dict[str, Any]:
        done = jobs.cluster.bsl("spy", str(run), "--json")
        return dict(json.loads(done.stdout))

    def last() -> list[str]:
        done = jobs.cluster.bsl("trace", "last", str(run), "-n", "1")
        assert done.returncode == 0, done.stderr
        return [line[:2] + line[19:].strip() if line.startswith("  ") else line for line in done.stdout.splitlines()]

    spied, told = said(), last()
    assert [rank["rank"] for rank in spied["ranks"]] == [0, 1, 2, 3]
    assert sorted(rank["node"] for rank in spied["ranks"]) == ["n0", "n0", "n1", "n1"]
    apart = ("rank 0 (n", "recv from rank 3 with tag 8", "send to rank 0 with tag 7")
    assert any(has_parts(line, *apart) for line in spied["verdict"]["evidence"])
    call = ("  not ended  recv", "rank 3", "tag 8, float32 [3]", f"{jobs.folder}/train.py:5 <module>")
    assert any(has_parts(line, *call) for line in told), told
    assert [line for line in told if not line.startswith(" ")] == [
        "rank 0 (dp0 pp0 tp0): step 0",
        "rank 3 (dp1 pp0 tp1): step 0",
        "ranks 1-2: step 0",
    ]
    assert jobs.cluster.bsl("cancel", str(run)).returncode == 0
    copies = RunDir(run).attempt("0001").rings
    wait_until(lambda: len(list(copies.glob("rank-*.ring"))) == 4)
    wait_until(lambda: not jobs.cluster.run("squeue", "-h").stdout.strip())
    assert last() == told
    assert any(has_parts(note, "tags", "rank 0") for note in said()["notes"])


# The jobs above hold what Slurm adds, and tests/process/test_spy_hangs.py the same verdict on the same ranks.
@pytest.mark.long
@pytest.mark.torch
def test_gloo_ranks_that_nobody_prepared(jobs: Jobs) -> None:
    """Four ranks on four nodes, started by a plain script; rank 2 never leaves its data loader."""
    program = f"{sys.executable} {PROGRAMS}/gloo_ranks.py loader {jobs.folder}/ready-$SLURM_PROCID 2"
    inner = f"RANK=$SLURM_PROCID WORLD_SIZE=4 {program}"
    body = f"export MASTER_ADDR=$(hostname) MASTER_PORT=29411 OMP_NUM_THREADS=1\nsrun bash -c '{inner}'"
    job = jobs.submit(body, "-N4", "--ntasks-per-node=1")
    wait_until(ready(jobs.folder, 4))
    time.sleep(1.0)
    document = jobs.spy(job, "--topology", "tp=2,dp=2")
    found = suspect(document)
    assert (found["rank"], found["node"], found["coordinate"]) == (2, "n2", {"pp": 0, "tp": 0, "dp": 1})
    assert document["verdict"]["state"] == "waiting", "it has just begun"
    assert "3 ranks" in document["verdict"]["claim"]
    jobs.cancel(job)


@pytest.mark.long
@pytest.mark.torch
def test_the_main_job_with_a_rank_that_skips_a_collective(jobs: Jobs) -> None:
    source = Path(json.__file__).parent.parent / "asyncio"
    corpus = f"{jobs.folder}/corpus/text"
    jobs.cluster.bsl("data", "prepare", str(source), "--output", corpus, "--vocab-size", "512", "--glob", "*.py")
    fault = "faults=[{kind: skip, rank: 5, step: 4}]"
    settings = ("run.name=hangs", f"run.root={jobs.folder}", f"data.prefix={corpus}", fault)
    done = jobs.cluster.bsl("submit", str(CONFIG), *(word for value in settings for word in ("--set", value)))
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    attempt = RunDir(jobs.folder / "hangs").attempt("0001")
    wait_until(lambda: '"fault"' in text_of(attempt.event_file(5)))
    time.sleep(3.0)
    document = jobs.spy(job)
    found = suspect(document)
    assert (found["rank"], found["node"], found["coordinate"]) == (5, "n2", {"pp": 1, "tp": 1, "dp": 0})
    assert document["verdict"]["class"] == "H01"
    assert "tensor-parallel group (ranks 4-5)" in document["verdict"]["claim"]
    jobs.cancel(job)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_dead_node_is_silent_and_delays_nobody_for_ever(make_cluster: MakeCluster, tmp_path: Path) -> None:
    jobs = Jobs(make_cluster(nodes=3, gpus_per_node=2), tmp_path)
    command = hung_processes(tmp_path, 1)
    job = jobs.submit(f"srun {command}", "-N3", "--ntasks-per-node=2")
    wait_until(ready(tmp_path, 6))
    assert jobs.cluster.bsl("cluster", "kill-node", "n2").returncode == 0
    began = time.monotonic()
    document = jobs.spy(job, "--topology", "dp=6", rc=4)
    assert time.monotonic() - began < 100
    assert [silent["node"] for silent in document["coverage"]["nodes_silent"]] == ["n2"]
    assert document["coverage"]["ranks_read"] == 4
    assert [(entry["rank"], entry["node"]) for entry in document["coverage"]["ranks_unreadable"]] == [
        (4, "n2"),
        (5, "n2"),
    ]
    assert suspect(document)["rank"] == 1


def test_nodes_that_share_a_host_keep_their_own_ranks(shared_cluster: SlurmCluster, tmp_path: Path) -> None:
    jobs = Jobs(shared_cluster, tmp_path)
    command = hung_processes(tmp_path, 3)
    job = jobs.submit(f"srun {command}", "-N3", "--ntasks-per-node=2")
    wait_until(ready(tmp_path, 6))
    document = jobs.spy(job)
    assert (suspect(document)["rank"], suspect(document)["node"]) == (3, "n1")
    assert document["coverage"]["ranks_read"] == document["world_size"] == 6
    jobs.cancel(job)
