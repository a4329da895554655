"""The main job on a real Slurm: ranks on isolated nodes train, are cancelled, resume, crash and lose a rank."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import RunDir
from tests.support.waiting import wait_until

from .conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]
CONFIG = Path(__file__).parents[2] / "configs" / "minicluster.yaml"
HALF = ("slurm.nodes=2", "parallelism.data_parallel_size=1")
"""The whole of it is in the long tier."""


@dataclass(frozen=True, slots=True)
class Site:
    """The cluster, with a corpus and a folder of runs."""

    cluster: SlurmCluster
    folder: Path

    def settings(self, name: str, *more: str) -> list[str]:
        values = (f"run.name={name}", f"run.root={self.folder}", f"data.prefix={self.folder}/corpus/text", *more)
        return [word for value in values for word in ("--set", value)]

    def submit(self, name: str, *more: str, wait: bool = True) -> tuple[RunDir, int]:
        """Submit the main job under `name`; return the run and the exit code of `bsl submit`."""
        options = ["--wait"] if wait else []
        done = self.cluster.bsl("submit", str(CONFIG), *options, *self.settings(name, *more), timeout_s=180)
        assert done.stdout.strip().isdigit(), done.stderr
        return RunDir(self.folder / name), done.returncode

    def status(self, run: RunDir) -> dict[str, Any]:
        done = self.cluster.bsl("status", str(run.path), "--json")
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status


def losses(run: RunDir) -> dict[int, str]:
    """Return the exact loss of each step; a later attempt overrides an earlier one."""
    found = {}
    for attempt in run.attempts():
        for path in sorted(attempt.events.glob("*.jsonl")):
            for record in read_events(path):
                if record["kind"] == "step":
                    found[record["step"]] = record["loss_hex"]
    return found


@pytest.fixture(scope="module")
def site(isolated_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("runs")
    source = Path(json.__file__).parent.parent / "asyncio"
    command = ["data", "prepare", str(source), "--output", f"{folder}/corpus/text", "--vocab-size", "512"]
    done = isolated_cluster.bsl(*command, "--glob", "*.py")
    assert done.returncode == 0, done.stderr
    return Site(isolated_cluster, folder)


@pytest.fixture(scope="module")
def resumed(site: Site) -> RunDir:
    """The job on half of its nodes, cancelled in the middle, and submitted again."""
    run, _ = site.submit("cancelled", *HALF, wait=False)
    wait_until(lambda: max(losses(run), default=0) >= 2)
    done = site.cluster.bsl("cancel", str(run.path))
    assert done.returncode == 0, done.stderr
    wait_until(lambda: site.status(run)["job"]["state"] in ("CANCELLED", "COMPLETED"))
    stopped_at = max(losses(run))
    assert stopped_at < 20
    _, code = site.submit("cancelled", *HALF)
    assert code == 0
    (loaded,) = [record for record in read_events(run.attempts()[-1].event_file(2)) if record["kind"] == "load"]
    assert loaded["checkpoint_step"] == stopped_at
    return run


def test_the_job_trains_over_nodes(site: Site, resumed: RunDir) -> None:
    status = site.status(resumed)
    assert status["job"]["state"] == "COMPLETED"
    assert status["step"]["step"] == 20
    assert status["checkpoint"]["path"].endswith("global_step20")
    logs = site.cluster.bsl("logs", str(resumed.path), "--node", "n1").stdout.splitlines()
    assert any("[n1 rank 2 dp0 pp1 tp0]" in line and "iteration       20/" in line for line in logs)
    assert all("[n1 rank " in line for line in logs if "rank " in line)


def test_a_cancelled_job_continues_where_it_was_stopped(resumed: RunDir) -> None:
    first, second = resumed.attempts()
    records = [record for attempt in (first, second) for record in read_events(attempt.event_file(2))]
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 21))


@pytest.mark.long
def test_a_cancelled_job_resumes_with_the_very_same_losses_and_weights(site: Site, resumed: RunDir) -> None:
    """On one machine, tests/train/test_resume.py shows the same."""
    undisturbed, code = site.submit("undisturbed", *HALF)
    assert code == 0
    assert losses(resumed) == losses(undisturbed)
    same = site.cluster.bsl("diff-weights", str(resumed.checkpoints), str(undisturbed.checkpoints))
    assert (same.returncode, "all equal" in same.stdout) == (0, True), same.stdout


# tests/unit/config/test_program.py holds which commands are the trainer.
@pytest.mark.long
def test_a_wrapped_trainer_is_the_trainer(site: Site) -> None:
    """Its layers are laid out and its steps are known, although `run.command` is given."""
    command = json.dumps(["nice", sys.executable, "-m", "bigsci_launch.train"])
    run, code = site.submit("wrapped", f"run.command={command}", "training.steps=5")
    assert code == 0, site.cluster.bsl("logs", str(run.path)).stdout
    status = site.status(run)
    assert (status["step"]["step"], status["step"]["total_steps"]) == (5, 5)
    assert status["checkpoint"]["path"].endswith("global_step5")


@pytest.mark.long
def test_a_killed_rank_is_a_failed_job_with_the_rank_and_node_in_the_exit_reason(site: Site) -> None:
    run, code = site.submit("killed", "faults=[{kind: die, rank: 5, step: 3}]")
    assert code != 0
    status = site.status(run)
    assert status["job"]["state"] == "FAILED"
    failure = status["exit"]["first_failure"]
    assert (failure["rank"], failure["node"], failure["signal"]) == (5, "n2", "SIGKILL")
    assert failure["coordinate"] == {"pp": 1, "tp": 1, "dp": 0}
    shown = site.cluster.run("scontrol", "show", "job", status["job"]["job_id"]).stdout
    assert "JobState=FAILED" in shown
