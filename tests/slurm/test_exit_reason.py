"""Why a job ended, where srun itself ends the ranks: on a real Slurm, with a short `slurm.wait_s`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.scheduler.hostlist import expand_hostlist
from tests.support.texts import has_parts

from .test_submit import Run, write_run

pytestmark = pytest.mark.slurm
SHORT = ("--set", "slurm.wait_s=4")


@pytest.fixture(scope="module")
def runs(isolated_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of two nodes that end in different ways, at the same time."""
    folder = tmp_path_factory.mktemp("runs")
    words = {"left": ("leave=3",), "lingering": ("steps=5", "linger=1")}
    made = {name: write_run(isolated_cluster, folder, *each, name=name) for name, each in words.items()}
    for run in made.values():
        run.submit(*SHORT)
    return made


def test_a_rank_that_leaves_early_is_named_and_no_node_is_called_lost(runs: dict[str, Run]) -> None:
    run = runs["left"]
    status = run.wait_for_state("FAILED")
    last = expand_hostlist(status["job"]["hostlist"])[-1]
    found = run.exit()
    assert (found["reason"], found["failed_ranks"]) == ("left_early", [3]), run.output()
    assert (found["first_failure"]["rank"], found["first_failure"]["node"]) == (3, last)
    assert has_parts(found["first_failure"]["error"], "exit code 0", "ranks 0-2")
    assert found["exit_code"] not in (0, None)


def test_a_rank_that_hangs_at_its_exit_is_named(runs: dict[str, Run]) -> None:
    run = runs["lingering"]
    run.wait_for_state("FAILED")
    found = run.exit()
    assert (found["reason"], found["failed_ranks"]) == ("hung_at_exit", [1]), run.output()
    assert has_parts(found["first_failure"]["error"], "4 s", "with 0")


def test_a_failed_launch_quotes_the_shell(isolated_cluster: Any, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("description: test\nscheduler: slurm\nranks_per_node: 2\nactivation: [module load no-such-thing]\n")
    run = write_run(isolated_cluster, tmp_path, name="modules")
    run.submit("--set", f"slurm.site={site}", "--wait", rc=127)
    assert (run.exit()["reason"], run.exit()["exit_code"]) == ("launch_failed", 127)
    assert "module: command" in run.exit()["cause"]
