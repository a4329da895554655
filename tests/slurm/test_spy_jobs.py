"""Jobs under every ID that squeue prints: `bsl spy`, `status` and `cancel` on arrays and heterogeneous jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.texts import has_parts
from tests.support.waiting import wait_until

from .conftest import SlurmCluster
from .spied_jobs import Jobs, hung_processes, ready, suspect

pytestmark = pytest.mark.slurm
SUBMITIT = """
import os, pathlib, time, submitit
def load_batch(): time.sleep(300)
def wait_for_peers(): time.sleep(300)
def train(odd):
    rank = int(os.environ["SLURM_PROCID"])
    pathlib.Path({folder!r}, f"ready-{{odd}}-{{rank}}").touch()
    load_batch() if rank == odd else wait_for_peers()
executor = submitit.AutoExecutor(folder={folder!r}, cluster="slurm")
executor.update_parameters(timeout_min=5, nodes=1, tasks_per_node=2, slurm_partition="debug")
print(executor.map_array(train, [1, 0])[0].job_id)
"""


@pytest.fixture
def jobs(isolated_cluster: SlurmCluster, tmp_path: Path) -> Jobs:
    return Jobs(isolated_cluster, tmp_path)


def numbers(jobs: Jobs, job: str) -> dict[str, str]:
    """Each ID that squeue prints for a job, and the number that it has of its own."""
    done = jobs.cluster.run("squeue", "-h", "-j", job, "-o", "%i %A")
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


def states(jobs: Jobs, job: str) -> set[str]:
    return set(jobs.cluster.run("squeue", "-h", "-j", job, "-o", "%i %T").stdout.splitlines())


def test_a_task_of_an_array_under_each_of_its_ids(jobs: Jobs) -> None:
    job = jobs.submit(f"srun {hung_processes(jobs.folder, 1)}", "-N1", "--ntasks-per-node=2", "--array=0-5%1")
    wait_until(ready(jobs.folder, 2))
    known = numbers(jobs, job)
    assert set(known) == {f"{job}_0", f"{job}_[1-5%1]"}
    for spelling in (f"{job}_0", known[f"{job}_0"], job):
        document = jobs.spy(spelling)
        assert (document["job"], suspect(document)["rank"]) == (f"{job}_0", 1)
        said = jobs.cluster.bsl("status", "--jobid", spelling)
        assert has_parts(said.stdout, f" {job}_0 (job.sh)", "RUNNING"), said
    for spelling in (f"{job}_[1-5%1]", f"{job}_3"):
        said = jobs.cluster.bsl("status", "--jobid", spelling, "--json")
        assert json.loads(said.stdout)["job"]["state"] == "PENDING", said
    assert jobs.cluster.bsl("cancel", "--jobid", f"{job}_[1-5%1]").returncode == 0
    assert states(jobs, job) == {f"{job}_0 RUNNING"}
    assert jobs.cluster.bsl("cancel", "--jobid", known[f"{job}_0"]).returncode == 0
    wait_until(lambda: not states(jobs, job))
    assert "has ended" in jobs.cluster.bsl("cancel", "--jobid", job).stderr


def test_a_heterogeneous_job_is_looked_at_as_a_whole(jobs: Jobs) -> None:
    """Its second component has two nodes, and slurmd numbers the tasks of each component from 0."""
    command = hung_processes(jobs.folder, 2)
    parts = ("-N1", "--ntasks-per-node=1", ":", "-N2", "--ntasks-per-node=1")
    script = jobs.folder / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun --het-group=0,1 {command}\n")
    done = jobs.cluster.run("sbatch", "--parsable", "-o", f"{jobs.folder}/job.out", *parts, str(script))
    job = done.stdout.strip()
    wait_until(ready(jobs.folder, 3))
    known = numbers(jobs, job)
    assert set(known) == {f"{job}+0", f"{job}+1"}
    for spelling in (job, f"{job}+1", known[f"{job}+1"]):
        document = jobs.spy(spelling)
        assert (document["job"], suspect(document)["rank"], suspect(document)["node"]) == (job, 2, "n2")
        assert document["coverage"]["ranks_read"] == document["world_size"] == 3
    said = jobs.cluster.bsl("status", "--jobid", f"{job}+0")
    assert has_parts(said.stdout, f"{job} (job.sh)", "3: n0,n[1-2]")
    assert jobs.cluster.bsl("cancel", "--jobid", f"{job}+1").returncode == 0
    wait_until(lambda: states(jobs, job) == {f"{job}+0 RUNNING"})
    jobs.cancel(job)


def test_a_job_array_of_submitit(jobs: Jobs) -> None:
    (jobs.folder / "submit.py").write_text(SUBMITIT.format(folder=str(jobs.folder)))
    done = jobs.cluster.run(sys.executable, str(jobs.folder / "submit.py"))
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip().removesuffix("_0")
    wait_until(ready(jobs.folder, 4))
    for task in (0, 1):
        document = jobs.spy(f"{job}_{task}")
        assert document["coverage"]["ranks_read"] == document["world_size"] == 2
        odd, other = (entry["ranks"] for entry in classes_by_place(document))
        assert (odd, other) == ([1 - task], [task])
    refused = jobs.cluster.bsl("spy", "--jobid", job)
    assert f"error: job {job} is an array: {job}_0, {job}_1 RUNNING\n" in refused.stderr
    assert f"such as {job}_0" in refused.stderr
    jobs.cancel(job)


def classes_by_place(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The classes of ranks, those in load_batch first."""
    return sorted(document["classes"], key=lambda entry: "load_batch" not in json.dumps(entry))


# The heterogeneous job above holds what Slurm adds.
@pytest.mark.long
@pytest.mark.torch
def test_a_job_of_torchx(jobs: Jobs) -> None:
    """TorchX makes a component for each replica, and a launcher in each that starts two ranks."""
    hung_processes(jobs.folder, 3)
    options = f"partition=debug,job_dir={jobs.folder}/torchx"
    words = ["-j", "2x2", "--cpu", "1", "--memMB", "1", "--script", "hung.py"]
    place = os.environ["PATH"]
    done = subprocess.run(
        [sys.executable, "-m", "torchx.cli.main", "run", "-s", "slurm", "-cfg", options, "dist.ddp", *words],
        cwd=jobs.folder,
        env={**jobs.cluster.environment(), "PATH": f"{Path(sys.executable).parent}:{place}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,  # it asks sacct for the job's state, which is not here
    )
    assert done.stdout.startswith("slurm://torchx/"), done.stderr
    job = done.stdout.strip().rpartition("/")[2]
    wait_until(ready(jobs.folder, 4))
    document = jobs.spy(f"{job}+1")
    assert (document["job"], suspect(document)["rank"], suspect(document)["node"]) == (job, 3, "n1")
    assert document["coverage"]["ranks_read"] == document["world_size"] == 4
    jobs.cancel(job)


def test_a_step_next_to_the_training_does_not_hide_it(jobs: Jobs) -> None:
    """Both have one Python process on each node, which Slurm numbers 0 and 1."""
    watch = f"{sys.executable} -c 'import time; time.sleep(300)'"
    train = hung_processes(jobs.folder, 1)
    body = f"srun --overlap {watch} &\nwhile ! squeue -hs -j $SLURM_JOB_ID | grep -qF .0; do sleep 0.1; done\n"
    job = jobs.submit(f"{body}srun --overlap bash -c '{train}; true'", "-N2", "--ntasks-per-node=1")
    wait_until(ready(jobs.folder, 2))
    document = jobs.spy(job)
    assert (suspect(document)["rank"], suspect(document)["node"]) == (1, "n1")
    assert document["coverage"]["ranks_read"] == document["world_size"] == 2
    assert has_parts(*document["coverage"]["steps_left_out"], "step 0, ", "2 processes", "n[0-1]:")
    for name in ("0", f"{job}.0"):
        other = jobs.spy(job, "--step", name)
        assert [entry["frames"][0]["function"] for entry in other["classes"]] == ["<module>"]
        assert other["coverage"]["steps_left_out"] == []
    refused = jobs.cluster.bsl("spy", "--jobid", job, "--step", "9")
    assert f"error: job {job}: step 9 " in refused.stderr
    jobs.cancel(job)


def test_what_a_job_printed_about_a_killed_rank_is_in_the_answer(jobs: Jobs) -> None:
    job = jobs.submit(
        f"srun --kill-on-bad-exit=0 {hung_processes(jobs.folder, 2, 'die')}", "-N2", "--ntasks-per-node=2"
    )
    wait_until(lambda: ready(jobs.folder, 4)() and "Killed" in (jobs.folder / "job.out").read_text())
    said = jobs.cluster.bsl("spy", "--jobid", job)
    assert has_parts(said.stdout, "task 2 on n1", "Killed", f"({jobs.folder}/job.out)", f"next: bsl why {job}")
    jobs.cancel(job)
