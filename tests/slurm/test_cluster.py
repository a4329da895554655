"""`bsl cluster` with a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bigsci_launch.scheduler.slurm import partition_nodes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slurm


def test_isolated_nodes_have_their_own_name_address_and_processes(isolated_cluster):
    address = "python3 -c 'import socket; print(socket.gethostbyname(socket.gethostname()))'"
    script = f"echo $(hostname) $({address}) $(readlink /proc/self/ns/pid)"
    done = isolated_cluster.run("srun", "-N4", "--ntasks-per-node=1", "sh", "-c", script)
    rows = sorted(line.split() for line in done.stdout.splitlines())
    assert [row[0] for row in rows] == ["n0", "n1", "n2", "n3"]
    assert [row[1].rpartition(".")[2] for row in rows] == ["10", "11", "12", "13"]
    assert len({row[2] for row in rows} | {str(Path("/proc/self/ns/pid").readlink())}) == 5


def test_a_node_knows_the_names_of_the_others(isolated_cluster):
    script = "import socket; print(sorted({i[4][0] for n in ('n0', 'n3') for i in socket.getaddrinfo(n, 80)}))"
    done = isolated_cluster.run("srun", "-N1", "-w", "n1", sys.executable, "-c", script)
    addresses = json.loads(done.stdout.replace("'", '"'))
    assert [address.rpartition(".")[2] for address in addresses] == ["10", "13"]


def test_the_machine_keeps_its_own_hosts_file(isolated_cluster):
    assert isolated_cluster.nodes[3] not in Path("/etc/hosts").read_text().split()


def test_a_monitoring_step_starts_beside_a_full_allocation(isolated_cluster, tmp_path):
    job = _submit(isolated_cluster, tmp_path, "#SBATCH -N4 --ntasks-per-node=2 --gres=gpu:2\nsrun sleep 600\n")
    _wait_for(isolated_cluster, job, "RUNNING")
    done = isolated_cluster.run(
        "srun", "--overlap", f"--jobid={job}", "--gres=gpu:0", "-N4", "--ntasks-per-node=1", "hostname"
    )
    assert sorted(done.stdout.split()) == ["n0", "n1", "n2", "n3"]
    assert isolated_cluster.run("squeue", "-h", "-j", job, "-o", "%T").stdout == "RUNNING\n", "it need not wait for it"
    assert isolated_cluster.run("scancel", job).returncode == 0


@pytest.mark.long
def test_a_requeued_job_runs_again_soon(isolated_cluster, tmp_path):
    out = tmp_path / "starts"
    body = f"#SBATCH -N1 --requeue\necho start-${{SLURM_RESTART_COUNT:-0}} >> {out}\nsleep 60\n"
    job = _submit(isolated_cluster, tmp_path, body)
    wait_until(lambda: out.exists() and "start-0" in out.read_text())
    assert isolated_cluster.run("scontrol", "requeue", job).returncode == 0
    wait_until(lambda: "start-1" in out.read_text())
    isolated_cluster.run("scancel", job)


@pytest.mark.long
@pytest.mark.torch
def test_gloo_ranks_on_four_nodes_find_each_other_by_name(isolated_cluster, tmp_path):
    program = tmp_path / "ranks.py"
    program.write_text(
        "import os, torch, torch.distributed as dist\n"
        "rank, size = int(os.environ['SLURM_PROCID']), int(os.environ['SLURM_NTASKS'])\n"
        "dist.init_process_group('gloo', rank=rank, world_size=size)\n"
        "value = torch.tensor([2.0**rank]); dist.all_reduce(value)\n"
        "print(f'rank {rank}: {value.item()}', flush=True); dist.destroy_process_group()\n"
    )
    body = (
        "#SBATCH -N4 --ntasks-per-node=2 --gres=gpu:2\n"
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)\n'
        "export MASTER_ADDR MASTER_PORT=20111\n"
        f"srun --kill-on-bad-exit=1 {sys.executable} {program}\n"
    )
    job = _submit(isolated_cluster, tmp_path, body)
    _wait_for(isolated_cluster, job, "COMPLETED")
    lines = (tmp_path / "job.out").read_text().splitlines()
    assert sorted(line for line in lines if line.startswith("rank")) == [f"rank {rank}: 255.0" for rank in range(8)]


def _submit(cluster, folder: Path, body: str) -> str:
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH -o {folder / 'job.out'}\n{body}")
    done = cluster.run("sbatch", "--parsable", str(script))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _wait_for(cluster, job: str, state: str, timeout_s: float = 180.0) -> None:
    wait_until(lambda: f"JobState={state} " in cluster.run("scontrol", "show", "job", job).stdout, timeout_s)


def test_a_partition_names_its_nodes_once_and_in_order(isolated_cluster):
    assert partition_nodes("debug") == partition_nodes(None) == ["n0", "n1", "n2", "n3"]
    assert partition_nodes("nope") == []
