"""Runs a reproduction as a Slurm job on several nodes, and cancels it afterwards."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bigsci_launch.config.load import load_run
from bigsci_launch.errors import JobNotFound, LabError
from bigsci_launch.hang_lab.programs import RANK_VARIABLES
from bigsci_launch.hang_lab.runner import Standing, Trial, require_possible, undisturbed
from bigsci_launch.hang_lab.stand import Job, wait_for_stand
from bigsci_launch.launch.prepare import plan_submission
from bigsci_launch.launch.submit import submit
from bigsci_launch.runs.layout import write_json
from bigsci_launch.scheduler.job import JobState
from bigsci_launch.scheduler.slurm import cancel_job, query_job
from bigsci_launch.topology import AXES, Topology

RANKS_PER_NODE = 2
TIME_LIMIT = "00:30:00"
QUEUE_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0
POLL_S = 0.5
# Variables that only make sense if all ranks are on one machine.
LOCAL_VARIABLES = {"MASTER_ADDR", "GLOO_SOCKET_IFNAME"}


@contextmanager
def reproduce_on_slurm(trial: Trial) -> Iterator[Standing]:
    """Yield the reproduction as a job that has reached its state. Cancel the job and delete its files afterwards.

    Raises:
        LabError: it cannot run on Slurm, or does not reach its state.
        SlurmUnavailable, SlurmRefused: sbatch is missing, or refuses the job.
    """
    topology = require_possible(trial)
    if trial.reproduction.stage:
        raise LabError(f"{trial.reproduction.name} needs preparations on the node, which only --local makes")
    # The current folder is shared by the nodes, as for any run; a temporary folder rarely is.
    folder = Path(tempfile.mkdtemp(prefix=".hang-lab-", dir=Path.cwd()))
    try:
        with submitted(trial, topology, folder) as standing:
            wait_for_stand(standing.job, trial.reproduction.stand, trial.timeout_s)
            yield standing
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def submitted(trial: Trial, topology: Topology, folder: Path) -> Iterator[Standing]:
    """Submit the job and yield it once it runs. Cancel it and wait for its end afterwards."""
    loaded = load_run(write_run_file(trial, topology, folder))
    request = plan_submission(loaded, working_directory=Path.cwd(), python=sys.executable, local=False)
    job_id = submit(loaded, request, sys.argv).record.job_id
    assert job_id is not None
    try:
        wait_until_running(job_id)
        job = Job(request.attempt, request.run.path / "lab", trial.num_ranks, trial.culprit, is_here=False)
        yield Standing(trial.reproduction, request.run, job, topology, launcher_pid=None)
    finally:
        with undisturbed():
            cancel_job(job_id)
            wait_until_over(job_id)


def write_run_file(trial: Trial, topology: Topology, folder: Path) -> Path:
    """Write a run file and a site file for the Slurm that sbatch reaches, as JSON, which is valid YAML."""
    site = {"description": "bsl hang-lab", "scheduler": "slurm", "ranks_per_node": RANKS_PER_NODE}
    write_json(folder / "site.yaml", site)
    slurm = {"site": "./site.yaml", "nodes": trial.num_ranks // RANKS_PER_NODE, "time_limit": TIME_LIMIT}
    path = folder / "run.yaml"
    write_json(path, {**run_document(trial, topology, folder), "slurm": slurm})
    return path


def run_document(trial: Trial, topology: Topology, folder: Path) -> dict[str, Any]:
    """Return the run file of a reproduction, without the site."""
    environment = {**RANK_VARIABLES, **trial.environment}
    return {
        "run": {"name": trial.reproduction.name, "root": str(folder), "command": trial.program(topology)},
        "parallelism": {axis.key: topology[axis.name] for axis in AXES},
        # Nothing reads the rest: the programs of the hang lab have no model, but a run file must name one.
        "model": {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "sequence_length": 64,
                  "vocab_size": 512},
        "training": {"steps": 100, "micro_batch_size": 1, "global_batch_size": 16 * topology.dp},
        "data": {"prefix": str(folder / "no-corpus")},
        "env": {name: {"value": value, "reason": "bsl hang-lab"} for name, value in environment.items()
                if name not in LOCAL_VARIABLES},
    }  # fmt: skip


def wait_until_running(job_id: str) -> None:
    """Wait for the job to start.

    Raises:
        LabError: it does not start.
    """
    end = time.monotonic() + QUEUE_TIMEOUT_S
    while (job := query_job(job_id)).state is not JobState.RUNNING:
        if job.state not in (JobState.PENDING, JobState.CONFIGURING) or time.monotonic() > end:
            raise LabError(f"job {job_id} did not start: {job.state.value} {job.reason or ''}".rstrip())
        time.sleep(POLL_S)


def wait_until_over(job_id: str) -> None:
    """Wait until no rank of the job is left.

    Raises:
        LabError: it does not end.
    """
    end = time.monotonic() + END_TIMEOUT_S
    while is_there(job_id):
        if time.monotonic() > end:
            raise LabError(f"job {job_id} was cancelled but does not end", hint=f"squeue -j {job_id}")
        time.sleep(POLL_S)


def is_there(job_id: str) -> bool:
    try:
        return query_job(job_id).state in (JobState.RUNNING, JobState.PENDING, JobState.COMPLETING)
    except JobNotFound:
        return False
