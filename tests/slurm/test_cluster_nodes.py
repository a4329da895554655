"""`bsl cluster` next to other clusters, with a dead node, and with a dead controller."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

import pytest

from bigsci_launch.procfs import read_processes
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slurm


def status(cluster) -> dict:
    return json.loads(cluster.bsl("cluster", "status", "--json").stdout)


def states(cluster) -> dict[str, str]:
    return {node["name"]: node["state"] for node in status(cluster)["nodes"]}


@pytest.mark.long
def test_a_killed_node_takes_its_ranks_along_and_slurm_calls_it_down(make_cluster, tmp_path):
    cluster = make_cluster(nodes=2)
    # A rank's PID here differs from its PID inside the node, so a unique program name is used to find it.
    rank = tmp_path / f"rank-{os.getpid()}"
    shutil.copy(str(shutil.which("sleep")), rank)
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nsrun -N2 --ntasks-per-node=1 {rank} 999\n")
    job = cluster.run("sbatch", "--parsable", "-N2", "-o", "/dev/null", "--no-requeue", str(script)).stdout.strip()
    wait_until(lambda: count_processes(rank.name) == 2)

    assert cluster.bsl("cluster", "kill-node", "n1").returncode == 0
    assert count_processes(rank.name) == 1

    again = cluster.bsl("cluster", "kill-node", "n1")
    assert again.returncode == 3 and has_parts(again.stderr, "error: n1 ")
    running = {node["name"]: node["running"] for node in status(cluster)["nodes"]}
    assert running == {"n0": True, "n1": False}
    wait_until(lambda: states(cluster)["n1"].startswith("down"))
    assert states(cluster)["n0"] in ("idle", "allocated", "mixed", "completing")
    wait_until(lambda: "JobState=NODE_FAIL" in cluster.run("scontrol", "show", "job", job).stdout)


def count_processes(name: str) -> int:
    return sum(process.command == name for process in read_processes().values())


def test_the_controller_is_in_reach_whichever_nodes_die(make_cluster):
    cluster = make_cluster(nodes=2, gpus_per_node=0)
    for name in cluster.nodes:
        assert cluster.bsl("cluster", "kill-node", name).returncode == 0
        assert status(cluster)["problem"] is None


def test_a_node_that_is_not_there_cannot_be_killed(isolated_cluster):
    done = isolated_cluster.bsl("cluster", "kill-node", "n9")
    assert done.returncode == 3 and has_parts(done.stderr, "n9", "hint: ", "n0, n1, n2, n3")


def test_a_node_that_shares_the_host_cannot_be_killed(shared_cluster):
    done = shared_cluster.bsl("cluster", "kill-node", "n0")
    assert done.returncode == 3
    assert "n0 cannot be killed" in done.stderr
    assert "--isolated" in done.stderr


def test_a_dead_controller_is_said_and_removed(make_cluster):
    cluster = make_cluster(nodes=1, isolated=False)
    records = [json.loads(line) for line in (cluster.directory / "processes.jsonl").read_text().splitlines()]
    os.kill(next(record["pid"] for record in records if record["name"] == "slurmctld"), signal.SIGKILL)
    wait_until(lambda: "slurmctld" in (status(cluster)["problem"] or ""))
    done = cluster.bsl("cluster", "status")
    assert done.returncode == 1
    assert "unknown" in done.stdout


def test_clusters_stand_beside_each_other(isolated_cluster, shared_cluster, make_cluster):
    other, second_shared = make_cluster(nodes=1), make_cluster(nodes=1, isolated=False)
    addresses = [
        {(node["address"], line) for node, line in zip(status(one)["nodes"], ports(one), strict=True)}
        for one in (isolated_cluster, shared_cluster, other, second_shared)
    ]
    assert sum(map(len, addresses)) == len(set.union(*addresses)) == 4 + 3 + 1 + 1
    for one, num_nodes in ((isolated_cluster, 4), (shared_cluster, 3), (other, 1), (second_shared, 1)):
        done = one.run("srun", f"-N{num_nodes}", "--ntasks-per-node=1", "printenv", "SLURMD_NODENAME")
        assert sorted(done.stdout.split()) == list(one.nodes)


def ports(cluster) -> list[str]:
    lines = cluster.slurm_conf.read_text().splitlines()
    return [line.split("Port=")[1].split()[0] for line in lines if line.startswith("NodeName=")]


def test_a_cluster_is_not_started_over_another(isolated_cluster):
    done = isolated_cluster.bsl("cluster", "up", "--nodes", "1")
    assert done.returncode == 3
    assert has_parts(done.stderr, isolated_cluster.directory, "`bsl cluster down`")
    assert status(isolated_cluster)["problem"] is None


def test_a_job_of_the_cluster_cannot_end_it(shared_cluster):
    done = shared_cluster.run("srun", "-n1", sys.executable, "-m", "bigsci_launch", "cluster", "down")
    assert has_parts(done.stderr, "error: a job", "cluster")
    assert status(shared_cluster)["problem"] is None
