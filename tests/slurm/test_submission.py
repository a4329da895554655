"""What reaches a job from where it is submitted: options of the environment, and the port of the first host."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.texts import has_parts

from .conftest import MakeCluster
from .test_submit import write_run

pytestmark = pytest.mark.slurm
HOLDER = """
import os, socket, time
first = 10000 + (int(os.environ["SLURM_JOB_ID"]) + 1) % 20000
servers = [socket.create_server(("", port)) for port in range(first, first + 5)]
print("listens", flush=True)
time.sleep(120)
"""


def test_a_port_that_is_taken_on_the_first_host_is_avoided(isolated_cluster: Any, tmp_path: Path) -> None:
    program, output = tmp_path / "holder.py", tmp_path / "holder.out"
    program.write_text(f"#!{sys.executable}\n{HOLDER}")
    holder = isolated_cluster.run("sbatch", "--parsable", "-w", "n0", "-n", "1", "-o", str(output), str(program))
    run = write_run(isolated_cluster, tmp_path, "steps=1", name="crowded")
    try:
        run.wait_for(lambda: output.exists() and "listens" in output.read_text())
        job_id = run.submit("--set", "slurm.nodelist=n[0-1]")
        run.wait_for_state("COMPLETED")
    finally:
        isolated_cluster.run("scancel", holder.stdout.strip())
    derived = 10000 + int(job_id) % 20000
    port = int(json.loads(run.log(0).split("up ", 1)[1].splitlines()[0])["MASTER_PORT"])
    assert port not in range(derived, derived + 5) and 10000 <= port < 30000
    assert any(has_parts(line, f"port {port} ", derived, "in use") for line in run.output().splitlines())
    assert f"bsl: rendezvous at n0:{port}\n" in run.output()


def test_ranks_meet_where_no_node_is_known_by_its_name(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(nodes=2, isolated=False, may_mount=False)
    run = write_run(cluster, tmp_path, "steps=1", name="nameless")
    for attempt, options in (("0001", ()), ("0002", ("--set", "survive={}"))):
        run.submit(*options)
        run.wait_for_state("COMPLETED")
        places = [json.loads(run.log(rank, attempt).split("up ", 1)[1].splitlines()[0]) for rank in range(4)]
        assert {place["MASTER_ADDR"] for place in places} == {"127.0.0.1"}, attempt
    assert any(has_parts(line, " n0 ", "127.0.0.1") for line in run.output().splitlines())


def test_an_account_of_the_environment_reaches_the_job(
    isolated_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    monkeypatch.setenv("SBATCH_JOB_NAME", "other")
    run = write_run(isolated_cluster, tmp_path, "steps=1", name="accounted", nodes=1)
    job_id = run.submit()
    assert has_parts(run.stderr, "SBATCH_ACCOUNT=mine", "--account\n")
    assert has_parts(run.stderr, "SBATCH_JOB_NAME=other", "--job-name=accounted\n")
    shown = isolated_cluster.run("scontrol", "show", "job", job_id).stdout
    assert "Account=mine" in shown and "JobName=accounted" in shown
    run.wait_for_state("COMPLETED")
