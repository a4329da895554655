"""The node of the batch script is killed: nothing writes exit.json, and `bsl status` works out which node it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .test_submit import write_run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


def test_a_lost_batch_host_is_named(make_cluster: Callable[..., Any], tmp_path: Path) -> None:
    cluster = make_cluster(nodes=3)
    run = write_run(cluster, tmp_path, name="headless", nodes=3)
    run.submit()
    run.wait_for_ranks(num=6)
    killed = cluster.bsl("cluster", "kill-node", "n0")
    assert killed.returncode == 0, killed.stderr
    status = run.wait_for_state("NODE_FAIL", timeout_s=90)
    run.wait_for(lambda: (run.status()["exit"] or {}).get("first_failure") is not None)
    found = run.status()["exit"]
    assert (found["reason"], found["exit_code"]) == ("node_failure", None), status
    assert (found["first_failure"]["rank"], found["first_failure"]["node"]) == (0, "n0")
    assert found["first_failure"]["coordinate"] == {"pp": 0, "tp": 0, "dp": 0}
    text = run.bsl("status", str(run.directory))
    assert "first failure  rank 0 (dp0 pp0 tp0) on n0: " in text
    assert "from the records of the ranks: the batch script left no exit.json" in text
    assert not list((run.directory / "attempts").glob("*/exit.json"))
    print(text)
