"""Slurmds that share one host: three, and the 48 of a cluster at scale."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm


# tests/slurm/test_spy.py reads the ranks of three such nodes.
@pytest.mark.long
def test_384_ranks_run_on_48_nodes(make_cluster):
    cluster = make_cluster(nodes=48, gpus_per_node=8, isolated=False)
    done = cluster.run(
        "srun",
        "-N48",
        "--ntasks-per-node=8",
        "--gres=gpu:8",
        "sh",
        "-c",
        'echo "$SLURM_PROCID $SLURMD_NODENAME"',
        timeout_s=120,
    )
    rows = sorted((int(rank), node) for rank, node in map(str.split, done.stdout.splitlines()))
    assert [rank for rank, _ in rows] == list(range(384))
    assert [node for _, node in rows] == [cluster.nodes[rank // 8] for rank in range(384)]


def test_listpids_names_the_ranks_of_a_node(shared_cluster):
    script = "sleep 1; scontrol listpids $SLURM_JOB_ID.$SLURM_STEP_ID $SLURMD_NODENAME; sleep 1"
    done = shared_cluster.run("srun", "-w", "n1", "-N1", "-n2", "sh", "-c", script)
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("PID")]
    assert {row[4] for row in rows if row[4].isdigit()} == {"0", "1"}


def test_ranks_find_every_node_by_name(shared_cluster):
    script = "import socket; print(socket.gethostbyname('n0'), socket.gethostbyname('n2'))"
    done = shared_cluster.run("srun", "-N2", "--ntasks-per-node=1", sys.executable, "-c", script)
    assert done.stdout == "127.0.0.1 127.0.0.1\n" * 2
    assert "n2" not in Path("/etc/hosts").read_text().split()
