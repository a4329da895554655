"""Jobs on a real Slurm that hang while nobody looks: noticed, explained, ended and resumed by the next link.

What a watcher does with one attempt is in tests/process/test_watch.py; that only the step of the ranks is ended on
Slurm, in test_control.py; how a chain continues after a hang, in tests/process/test_chain_decision.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.layout import RunDir, read_json
from bigsci_launch.runs.watching.ledger import read_acts, read_findings
from bigsci_launch.top.details import read_details
from bigsci_launch.top.job_logs import JobLogs
from bigsci_launch.top.list import list_rows
from bigsci_launch.top.rows import TopDetails
from bigsci_launch.watch.facts.job import JobPoller
from bigsci_launch.watch.facts.standing import Tempo, near_limits
from bigsci_launch.watch.watched import watched_run
from tests.support.waiting import wait_until

from .conftest import SlurmCluster

PROGRAM = Path(__file__).parent / "programs" / "log_only.py"
TORCHRUN = (
    "-m torch.distributed.run --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d "
    "--rdzv-endpoint $MASTER_ADDR:$MASTER_PORT"
)
MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "sequence_length": 16, "vocab_size": 512}


def write(folder: Path, name: str, **more: Any) -> None:
    config: dict[str, Any] = {
        "run": {"name": name},
        "slurm": {
            "site": "minicluster",
            "nodes": 2,
            "time_limit": "00:20:00",
            "chain": {"by": "queue", "max_starts": 4},
        },
        "parallelism": {"data_parallel_size": 4},
        "model": MODEL,
        "training": {"steps": 400, "micro_batch_size": 1, "global_batch_size": 4, "precision": "fp32"},
        "data": {"prefix": str(folder / "corpus")},
        "checkpoint": {"save_interval": 10},
        "monitor": {"watch": "act", "step_time_s": 2, "save_time_s": 2},
    }
    for section, values in more.items():
        config[section] = {**config.get(section, {}), **values}
    (folder / f"{name}.yaml").write_text(json.dumps(config))


def workers(rank: int, run: RunDir) -> list[int]:
    """Return the process of this machine that computes as `rank`, without the launcher that started it."""
    wanted, found = {f"RANK={rank}", f"BSL_RUN_DIR={run.path}", "BSL_ATTEMPT=0001"}, []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = set((path / "environ").read_bytes().decode(errors="replace").split("\0"))
            words = (path / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        is_worker = words.endswith(("bigsci_launch.train\0", f"{PROGRAM}\0")) and "torch.distributed.run" not in words
        if wanted <= variables and is_worker:
            found.append(int(path.name))
    return found


def step_of(run: RunDir, attempt: str) -> int:
    """The newest step that the ranks of an attempt have printed."""
    text = "".join(path.read_text(errors="replace") for path in run.attempt(attempt).logs.glob("*.log"))
    steps = [int(line.split("iteration")[1].split("/")[0]) for line in text.splitlines() if " iteration " in line]
    return max(steps, default=0)


def test_a_maintenance_that_the_admins_add_while_a_job_runs_is_seen(
    isolated_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "sleeps", run={"name": "sleeps", "command": ["sleep", "600"]}, monitor={"watch": "off"})
    assert isolated_cluster.bsl("submit", "sleeps.yaml").returncode == 0
    watched = watched_run(RunDir(tmp_path / "runs" / "sleeps"))
    poller = JobPoller(watched)
    wait_until(lambda: poller.ask("job") or poller.view.is_running)
    wait_until(lambda: poller.ask("maintenance") or poller.view.maintenance == ())
    begins = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 600))
    options = ["Nodes=n0", f"StartTime={begins}", "Duration=60", "Users=root", "Flags=MAINT,IGNORE_JOBS"]
    made = isolated_cluster.run("scontrol", "create", "reservation", "ReservationName=cooling", *options)
    try:
        assert made.returncode == 0, made.stderr
        wait_until(lambda: poller.ask("maintenance") or poller.view.maintenance)
        (found,) = near_limits(watched.attempt, poller.view, Tempo())
        assert "cooling" in found.sentence
    finally:
        isolated_cluster.run("scontrol", "delete", "ReservationName=cooling")
        isolated_cluster.bsl("cancel", "sleeps")


def _shown_in_top(folder: Path, job: str) -> TopDetails:
    rows, trouble = list_rows(folder)
    assert not trouble
    logs = JobLogs()
    logs.begin_look(1)
    return read_details(next(row for row in rows if row.key == job), time.time(), logs)


def test_a_job_of_somebody_else_is_watched_by_its_log(
    isolated_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    line = " iteration $i/ 9999 | elapsed time per iteration (ms): 200.0 |"
    (tmp_path / "job.sh").write_text(f'#!/bin/bash\nfor i in $(seq 9999); do echo "{line}"; sleep 0.2; done\n')
    argv = ["sbatch", "--parsable", "--nodes=1", "--gpus-per-node=2", f"--output={tmp_path}/log-%j.txt", "job.sh"]
    job = isolated_cluster.run(*argv).stdout.strip()
    wait_until(lambda: (tmp_path / f"log-{job}.txt").exists())
    seen = isolated_cluster.bsl("watch", "--jobid", job, "--once", "--json")
    assert seen.returncode == 0, seen.stderr
    document = json.loads(seen.stdout)
    assert (document["health"], document["run"], document["job_id"]) == ("healthy", None, job)
    assert document["step"] > 0
    monkeypatch.setenv("SLURM_CONF", str(isolated_cluster.slurm_conf))
    shown = _shown_in_top(tmp_path, job)
    assert (shown.step or 0) >= document["step"] and shown.total_steps == 9999 and shown.seconds == 0.2
    assert shown.gpu_hours is not None
    # Nobody can see what a job prints whose log is gone.
    (tmp_path / f"log-{job}.txt").unlink()
    blind = isolated_cluster.bsl("watch", "--jobid", job, "--once")
    assert blind.returncode == 4, blind.stdout
    assert "not known" in blind.stdout
    isolated_cluster.run("scancel", job)
    refused = isolated_cluster.bsl("watch", "--jobid", job, "--act")
    assert refused.returncode == 2


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize("kind", ["trainer", "torchrun"])
def test_a_hang_is_ended_and_the_next_link_resumes_from_the_last_save(
    kind: str, isolated_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if kind == "trainer":
        text = tmp_path / "text"
        text.mkdir()
        (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 3000)
        done = isolated_cluster.bsl("data", "prepare", "text", "--output", "corpus", "--vocab-size", "280")
        assert done.returncode == 0, done.stderr
        write(tmp_path, kind)
    else:
        words = f"exec {sys.executable} {TORCHRUN} {PROGRAM}"
        write(tmp_path, kind, run={"name": kind, "command": ["bash", "-c", words]})
    done = isolated_cluster.bsl("submit", f"{kind}.yaml")
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "runs" / kind)
    wait_until(lambda: step_of(run, "0001") >= 45)
    victims = workers(1, run)
    assert victims, "no rank to stop"
    for pid in victims:
        os.kill(pid, signal.SIGSTOP)
    began = time.time()
    finding = wait_until(lambda: next((each for each in read_findings(run) if each.kind == "hang"), None))
    print(f"{kind}: noticed after {finding.noticed - began:.0f} s: {finding.sentence}")
    ended = wait_until(lambda: run.attempt("0001").exit.exists() and read_json(run.attempt("0001").exit))
    print(f"{kind}: ended after {time.time() - began:.0f} s")
    assert ended["reason"] == "hang"
    assert ended["spy_bundle"]
    last = step_of(run, "0001")
    wait_until(lambda: step_of(run, "0002") > last)
    print(f"{kind}: past step {last} again after {time.time() - began:.0f} s")
    text = "".join(path.read_text() for path in run.attempt("0002").logs.glob("*.log"))
    first = min(int(line.split("iteration")[1].split("/")[0]) for line in text.splitlines() if " iteration " in line)
    assert last - 10 <= first - 1 <= last, (first, last)
    assert [act.what for act in read_acts(run) if act.state == "begun"] == ["end_ranks"]
    isolated_cluster.bsl("cancel", kind)
