"""Submissions whose answer is lost, or that are killed before the job is recorded: a run never has two jobs at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.texts import has_parts

from .conftest import MakeCluster, SlurmCluster
from .test_status import processes
from .test_submit import Run, write_run

pytestmark = pytest.mark.slurm


@contextmanager
def sbatch_as(folder: Path, lines: str) -> Iterator[None]:
    """Make sbatch a shell script of these lines, in which $sbatch is the real one."""
    script = folder / "bin" / "sbatch"
    script.parent.mkdir()
    script.write_text(f"#!/bin/bash\nsbatch={shutil.which('sbatch')}\n{lines}\n")
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
        yield


def queue_of(run: Run) -> list[str]:
    return run.cluster.run("squeue", "-h", "-o", "%i %j").stdout.splitlines()


def test_a_job_whose_submission_timed_out_is_found(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(nodes=1, isolated=False)
    conf = cluster.slurm_conf.read_text()
    assert "MessageTimeout=20\n" in conf, "sbatch would wait so long for the answer"
    cluster.slurm_conf.write_text(conf.replace("MessageTimeout=20\n", "MessageTimeout=2\n"))
    [controller] = processes(cluster, "slurmctld")
    run = write_run(cluster, tmp_path, name="slow", nodes=1)
    stop = f"kill -STOP {controller}; (sleep 5; kill -CONT {controller}) >&- 2>&- &"
    with sbatch_as(tmp_path, f'{stop} exec $sbatch --hold "$@"'):
        job_id = run.submit()
    assert has_parts(run.stderr, "Socket timed out", "squeue", f"job {job_id}")
    assert queue_of(run) == [f"{job_id} slow"]
    run.submit(rc=2)
    assert f"attempt 0001 (job {job_id}) is PENDING" in run.stderr
    run.bsl("cancel", str(run.directory))
    assert queue_of(run) == []


def test_a_killed_submission_leaves_a_job_that_is_found(isolated_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = write_run(isolated_cluster, tmp_path, name="killed", nodes=1)
    with sbatch_as(tmp_path, '$sbatch "$@"; kill -KILL $PPID'):
        run.submit(rc=-9)
    assert not (run.directory / "attempts" / "0001" / "job.json").exists()
    run.wait_for_ranks(num=2)
    status = run.status()
    job_id = status["job"]["job_id"]
    assert (status["job"]["state"], status["job"]["source"]) == ("RUNNING", "squeue")
    [listed] = json.loads(run.bsl("list", "--json"))["runs"]
    assert (listed["state"], listed["job"]) == ("RUNNING", f"job {job_id}")
    run.submit(rc=2)
    assert f"attempt 0001 (job {job_id}) is RUNNING" in run.stderr
    recorded = json.loads((run.directory / "attempts" / "0001" / "job.json").read_text())
    assert recorded["job_id"] == job_id, "the next submission notes the job down"

    by_hand = run.cluster.run("sbatch", "--parsable", str(run.directory / "attempts" / "0001" / "script.sh"))
    assert f"job {job_id}: cancel requested" in run.bsl("cancel", str(run.directory))
    run.wait_for_state("CANCELLED")
    assert (run.exit()["reason"], run.exit()["job_id"]) == ("cancelled", job_id)
    refused = f"job {by_hand.stdout.strip()} "
    assert any(has_parts(line, refused, f"attempt 0001 is {job_id}") for line in run.output().splitlines())
    assert run.output().count("bsl: start attempt=0001") == 1


def test_a_late_job_does_not_run_beside_a_later_attempt(isolated_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = write_run(isolated_cluster, tmp_path, name="late", nodes=1)
    with sbatch_as(tmp_path, '$sbatch --hold "$@"; kill -KILL $PPID'):
        run.submit(rc=-9)
    [job_id] = [line.split()[0] for line in queue_of(run) if line.endswith(" late")]
    (run.directory / "attempts" / "0002").mkdir()
    assert run.cluster.run("scontrol", "release", job_id).returncode == 0
    run.wait_for(lambda: not any(line.endswith(" late") for line in queue_of(run)))
    assert has_parts(run.output().splitlines()[-1], f"job {job_id} ", "attempt 0001", "attempt 0002")
    assert not (run.directory / "attempts" / "0001" / "exit.json").exists() and not run.log(0)
