"""What `bsl` says of jobs that only Slurm's accounting still knows, by a real slurmdbd."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until

from .accounting import missing_programs, with_accounting
from .conftest import SlurmCluster, _start, _stop
from .test_submit import Run, write_run

pytestmark = [pytest.mark.slurm, pytest.mark.long]
LEFT_S = 200.0
"""From the last end of a job until squeue has forgotten all."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs that have left squeue, by what became of them."""

    cluster: SlurmCluster
    own: Run
    cancelled: Run
    foreign: dict[str, str]

    def of(self, name: str) -> dict[str, Any]:
        """What `bsl status --jobid` says of a foreign job."""
        found: dict[str, Any] = json.loads(self.cluster.bsl("status", "--jobid", self.foreign[name], "--json").stdout)
        return found["job"]


@pytest.fixture(scope="module")
def jobs(slurm_packages: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """One cluster for all tests here: the jobs take a minute to be forgotten."""
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)}")
    cluster = _start(4, 2, isolated=False)
    try:
        with tempfile.TemporaryDirectory(prefix="bsl-", dir="/tmp") as folder, with_accounting(cluster, Path(folder)):
            yield _made(cluster, tmp_path_factory.mktemp("jobs"))
    finally:
        _stop(cluster)


def _made(cluster: SlurmCluster, folder: Path) -> Jobs:
    own, cancelled = write_run(cluster, folder, "steps=1", name="own"), write_run(cluster, folder, name="cancelled")
    own.submit()
    number = cancelled.submit()
    cancelled.wait_for_ranks()
    assert cluster.run("scancel", number).returncode == 0
    sleeps = _batch(cluster, folder, "--wrap", "sleep 300")
    foreign = {
        "failed": _batch(cluster, folder, "--wrap", "exit 3"),
        "late": _batch(cluster, folder, "--time", "1", "--wrap", "sleep 300"),
        "array": _batch(cluster, folder, "--array", "0-1", "--wrap", "exit $SLURM_ARRAY_TASK_ID"),
        "mixed": _batch(cluster, folder, "-N1", ":", "-N2", "--wrap", "true"),
        "requeued": _batch(cluster, folder, "--requeue", "--wrap", 'test -n "$SLURM_RESTART_COUNT" || sleep 300'),
        "cancelled": sleeps,
    }
    for name, act in (("requeued", ("scontrol", "requeue")), ("cancelled", ("scancel",))):
        argv = ["squeue", "-h", "-j", foreign[name], "-o", "%T"]
        wait_until(
            lambda argv=argv: cluster.run(*argv).stdout.strip() == "RUNNING",
            evidence=lambda: cluster.run("squeue").stdout,
        )
        assert cluster.run(*act, foreign[name]).returncode == 0
    wait_until(
        lambda: not cluster.run("squeue", "-h", "-t", "all").stdout,
        LEFT_S,
        evidence=lambda: cluster.run("squeue").stdout,
    )
    return Jobs(cluster, own, cancelled, foreign)


def _batch(cluster: SlurmCluster, folder: Path, *words: str) -> str:
    done = cluster.run("sbatch", "--parsable", "--output", f"{folder}/%j.out", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_own_runs_are_found_by_their_comment(jobs: Jobs) -> None:
    assert jobs.own.status()["job"]["state"] == "COMPLETED"
    status = jobs.cancelled.status()
    assert (status["job"]["state"], status["job"]["source"]) == ("CANCELLED", "sacct")
    assert status["cancelled_by"] == "root"


@pytest.mark.parametrize(
    ("name", "state"),
    [("failed", "FAILED"), ("late", "TIMEOUT"), ("requeued", "COMPLETED"), ("cancelled", "CANCELLED")],
)
def test_a_foreign_job_that_only_sacct_knows(jobs: Jobs, name: str, state: str) -> None:
    found = jobs.of(name)
    assert (found["state"], found["source"]) == (state, "sacct")
    assert not found["reason"], "once it waited for its begin time, and that is over"


def test_tasks_of_an_array_have_states_of_their_own(jobs: Jobs) -> None:
    states = {}
    for task in ("0", "1"):
        jobs.foreign[task] = f"{jobs.foreign['array']}_{task}"
        states[task] = jobs.of(task)["state"]
    assert states == {"0": "COMPLETED", "1": "FAILED"}


def test_a_component_of_a_heterogeneous_job_stands_for_the_whole(jobs: Jobs) -> None:
    jobs.foreign["second"] = f"{jobs.foreign['mixed']}+1"
    assert (jobs.of("mixed")["num_nodes"], jobs.of("second")["num_nodes"]) == (3, 3)


def test_a_job_that_nothing_knows(jobs: Jobs) -> None:
    done = jobs.cluster.bsl("status", "--jobid", "4711")
    assert done.returncode == 3 and "sacct has no record of it" in done.stderr
