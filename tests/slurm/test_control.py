"""What people ask of a run on a real Slurm: only the step of the ranks is ended, and the job script says why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.ledger import Act, read_acts
from tests.support.texts import has_parts

from .test_submit import Run, write_run

pytestmark = pytest.mark.slurm
HANDLER = Path(__file__).parents[1] / "process" / "programs" / "serve_requests.py"


@pytest.fixture
def watch(isolated_cluster: Any) -> Iterator[Callable[[Run], None]]:
    """`watch(run)` serves what is asked of a run, until its attempt is over."""
    started: list[subprocess.Popen[bytes]] = []

    def start(run: Run) -> None:
        argv = [sys.executable, str(HANDLER), str(run.directory), "5"]
        with (run.folder / "handler").open("w") as output:
            started.append(
                subprocess.Popen(argv, env=run.cluster.environment(), stdout=output, stderr=subprocess.STDOUT)
            )

    yield start
    for process in started:
        process.terminate()
        process.wait(180)


def acts(run: Run, what: str) -> list[Act]:
    return [act for act in read_acts(RunDir(run.directory)) if act.what == what]


def test_ranks_that_hang_are_ended_for_somebody_who_wants_to_stop_them(
    isolated_cluster: Any, tmp_path: Path, watch: Callable[[Run], None]
) -> None:
    run = write_run(isolated_cluster, tmp_path, "ignore-term", name="hung")
    run.submit()
    run.wait_for_ranks()
    watch(run)
    (run.directory / "control" / "exit").write_text("nobody answers\n")
    run.wait_for_state("FAILED", "CANCELLED", "COMPLETED")
    ended = run.exit()
    assert ended["reason"] == "cancelled" and has_parts(ended["evidence"][0], "root", "nobody answers")
    run.wait_for(lambda: acts(run, "exit")[-1].state != "begun")
    assert [act.stage for act in acts(run, "exit")] == ["", "asked", "look 1", "ended", "killed", "killed"]
    by = json.loads((run.directory / "attempts" / "0001" / "ended.json").read_text())
    assert (by["continues"], Path(by["bundle"], "verdict.json").exists()) == (False, True)
    assert "TERM" in run.log(0), "it was told before it was killed"
    exits = [json.loads(path.read_text()) for path in (run.directory / "attempts" / "0001" / "exits").glob("rank-*")]
    assert len(exits) == 4 and all(each["terminated"] for each in exits), "every runner wrote how its rank ended"
    assert "end attempt=0001" in run.output(), "the job script came to its end"


def test_a_program_that_listens_is_asked_with_its_stop_signal(
    isolated_cluster: Any, tmp_path: Path, watch: Callable[[Run], None]
) -> None:
    run = write_run(isolated_cluster, tmp_path, "stop-on-usr2", "helper", name="listens", nodes=1)
    run.submit()
    run.wait_for_ranks(num=2)
    watch(run)
    assert has_parts(refused(run, "save"), "`bsl train`", "another program")
    run.bsl("control", str(run.directory), "restart", "--why", "a new revision")
    assert "slurm.chain" in run.stderr
    run.wait_for_state("COMPLETED", "FAILED")
    assert run.exit()["reason"] == "stopped" and has_parts(*run.exit()["evidence"], "root", "a new revision")
    assert all("asked to stop" in run.log(rank) and "helper died" not in run.log(rank) for rank in range(2))
    run.wait_for(lambda: acts(run, "restart")[-1].state == "done")
    assert "has ended: COMPLETED" in refused(run, "exit")


def refused(run: Run, verb: str) -> str:
    run.bsl("control", str(run.directory), verb, "--why", "why not", rc=2)
    return run.stderr
