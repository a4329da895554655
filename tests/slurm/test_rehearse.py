"""`bsl rehearse` on a real Slurm: the kill, the stop request and the end of a job are Slurm's own."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.support.texts import has_parts
from tests.support.waiting import wait_until

from .conftest import SlurmCluster

pytestmark = pytest.mark.slurm
RUN_TRUE = 'run.command=["true"]'
PROGRAM = Path(__file__).parents[1] / "process" / "programs" / "megatron_like.py"
CONFIG = Path(__file__).parents[2] / "configs" / "minicluster.yaml"
HOLD_ALL = ("--parsable", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300")
MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}


def run_file(folder: Path, mode: str = "") -> Path:
    """Write a run of 8 ranks on 4 nodes; relative paths of the run begin at `folder`."""
    config = {
        "run": {
            "name": "trial",
            "root": str(folder / "runs"),
            "command": [sys.executable, str(PROGRAM), *([mode] if mode else [])],
        },
        "slurm": {"site": "minicluster", "nodes": 4, "time_limit": "00:10:00"},
        "parallelism": {"tensor_parallel_size": 2},
        "model": {**MODEL, "vocab_size_multiple": 8},
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 4},
        "data": {"prefix": "none"},
        "monitor": {"step_time_s": 1, "save_time_s": 1, "exit_margin_s": 30},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def found(document: dict[str, Any], name: str) -> str:
    return "; ".join(next(phase["found"] for phase in document["phases"] if phase["name"] == name))


def jobs(cluster: SlurmCluster) -> list[str]:
    return cluster.run("squeue", "-h", "-o", "%j %T").stdout.splitlines()


def test_a_go_is_what_submit_then_mentions(isolated_cluster: SlurmCluster, tmp_path: Path) -> None:
    config = str(run_file(tmp_path))
    done = isolated_cluster.bsl("rehearse", config, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"]) == (0, "go"), done.stderr
    assert {phase["outcome"] for phase in document["phases"]} == {"ok"}, done.stderr
    assert "4 ranks on n" in found(document, "start")
    killed = found(document, "kill a rank")
    assert has_parts(killed, "rank 3 on n", "no process left"), "both nodes were looked at in the next attempt"
    assert "in 30" not in found(document, "stop")
    after = isolated_cluster.bsl("submit", config, "--wait", "--set", RUN_TRUE)
    assert "never rehearsed" in after.stderr, "another program"
    same = isolated_cluster.bsl("submit", config)
    isolated_cluster.bsl("cancel", str(tmp_path / "runs" / "trial"))
    assert "rehearsed at " in same.stderr and ": go" in same.stderr and "never" not in same.stderr, same.stderr


def test_a_job_that_never_starts_is_neither_go_nor_no_go(isolated_cluster: SlurmCluster, tmp_path: Path) -> None:
    blocking = isolated_cluster.run("sbatch", *HOLD_ALL).stdout.strip()
    try:
        config = str(run_file(tmp_path))
        done = isolated_cluster.bsl("rehearse", config, "--start-within", "00:00:05", "--json")
        document = json.loads(done.stdout)
        assert (done.returncode, document["verdict"]) == (4, "unknown"), done.stderr
        assert "never started: PENDING (" in document["never_started"]
        assert {phase["outcome"] for phase in document["phases"]} == {"not checked"}
        wait_until(lambda: not any(line.startswith("rehearse-trial") for line in jobs(isolated_cluster)))
    finally:
        isolated_cluster.run("scancel", blocking)


def test_a_refused_rehearsal_leaves_nothing(isolated_cluster: SlurmCluster, tmp_path: Path) -> None:
    done = isolated_cluster.bsl("rehearse", str(run_file(tmp_path)), "--set", "slurm.constraint=a100")
    assert (done.returncode, done.stdout) == (3, "")
    assert has_parts(done.stderr, "error: sbatch: ", "Invalid feature")
    assert not list((tmp_path / "runs").glob("rehearsals/*"))


def test_an_interrupted_rehearsal_cancels_its_job(isolated_cluster: SlurmCluster, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bigsci_launch", "rehearse", str(run_file(tmp_path))]
    process = subprocess.Popen(argv, env=isolated_cluster.environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("steps: ok"):
            break
    process.terminate()
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 130 and has_parts(stderr, "attempt 0001, job", "has ended"), stderr
    wait_until(lambda: not any(line.startswith("rehearse-trial") for line in jobs(isolated_cluster)))


@pytest.mark.torch
@pytest.mark.long
def test_the_main_job_is_rehearsed(isolated_cluster: SlurmCluster, tmp_path: Path) -> None:
    source = Path(sysconfig.get_path("stdlib")) / "asyncio"
    corpus = f"{tmp_path}/corpus/text"
    isolated_cluster.bsl("data", "prepare", str(source), "--output", corpus, "--vocab-size", "512", "--glob", "*.py")
    settings = (f"run.root={tmp_path}/runs", f"data.prefix={corpus}")
    words = [word for setting in settings for word in ("--set", setting)]
    done = isolated_cluster.bsl("rehearse", str(CONFIG), "--json", *words, timeout_s=290)
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"]) == (0, "go"), done.stderr
    assert "last bit" in found(document, "resume after kill")
    assert has_parts(*document["not_checked"], "dp 2 -> 1")
