"""`bsl spy` through a scheduler that it does not have: one implementation, one entry in each of two tables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.content import packaged
from bigsci_launch.errors import JobNotFound
from bigsci_launch.scheduler import choice
from bigsci_launch.scheduler.job import JobInfo, JobState, MonitorStep, NodeInfo, StepEnd
from bigsci_launch.spy.evidence.bundle import read_bundle
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.commands import on_node, typed
from bigsci_launch.spy.look import collect
from tests.support.texts import has_parts

NODES = ("n0", "n1")
PER_NODE = 2
# What its nodes know: the file of a node lists a job's processes and their numbers.
TABLE = """
VARIABLES["toy"] = {{"job": "TOY_JOB", "task": "TOY_TASK", "node": "TOY_NODE", "num_tasks": "TOY_TASKS"}}


def list_toy(job_ids, node, problems):
    lines = (read_text({folder!r} + "/" + node) or "").splitlines()
    return [(int(pid), "0", int(task)) for pid, task in map(str.split, lines)], "toy list"


LISTERS["toy"] = list_toy
"""


class Toy:
    """Runs jobs in a folder. Its third node is broken."""

    name, starter = "toy", "toyrun"
    show_job, list_steps = "toy show {job_id}", "toy steps {job_id}"

    def find_job(self, job_id: str) -> JobInfo:
        if job_id != "toy-7":
            raise JobNotFound(f"{job_id}: no such job")
        return JobInfo(job_id, JobState.RUNNING, "runs", "toy", hostlist="n[0-2]", number="7")

    def nodes_of(self, job: JobInfo) -> list[NodeInfo]:
        return [*(NodeInfo(node, "up", "") for node in NODES), NodeInfo("n2", "down", "")]

    def run_on_nodes(self, job_id: str, step: MonitorStep) -> StepEnd:
        for node in step.nodes:
            choice.HERE.run_on_nodes("", replace(step, argv=["env", f"TOY_NODE={node}", *step.argv]))
        return StepEnd((), "")

    def command_on_node(self, command: str, job_id: str, *, node: str | None = None, group: int | None = None) -> str:
        return f"toyrun {job_id} {node} {command}"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[None]:
    """Four ranks on two nodes, which only their scheduler numbers."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for node in NODES:
            for _ in range(PER_NODE):
                place = {"TOY_JOB": "7", "TOY_TASK": str(len(ranks)), "TOY_TASKS": "4", "TOY_NODE": node}
                argv = [sys.executable, "-c", "import time; time.sleep(300)"]
                ranks.append(subprocess.Popen(argv, env={**os.environ, **place}))
                with (tmp_path / node).open("a") as listed:
                    listed.write(f"{ranks[-1].pid} {len(ranks) - 1}\n")
        yield
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture
def answer(job: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evidence:
    toy = Toy()
    monkeypatch.setattr(choice, "OF_JOBS", toy)
    monkeypatch.setitem(choice.SCHEDULERS, "toy", toy)
    with_table = tmp_path / "diagnostics"
    shutil.copytree(str(packaged("diagnostics")), with_table, ignore=shutil.ignore_patterns("signatures", "lab"))
    with (with_table / "node_scheduler.py").open("a") as table:
        table.write(TABLE.format(folder=str(tmp_path)))
    monkeypatch.setattr(collect, "packaged", {"diagnostics": with_table}.__getitem__)
    argv = ["spy", "--jobid", "toy-7", "--topology", "dp=4", "--output", str(tmp_path / "bundle"), "--json"]
    done = CliRunner().invoke(bsl, argv)
    assert done.exit_code == 4, done.stderr
    return read_bundle(tmp_path / "bundle").evidence()


def test_spy_asks_a_scheduler_that_it_does_not_have(answer: Evidence) -> None:
    assert [(seen.rank, seen.node) for seen in answer.ranks] == [(0, "n0"), (1, "n0"), (2, "n1"), (3, "n1")]
    assert {seen.numbered_by.value for seen in answer.ranks} == {"task id"}
    assert all(seen.threads for seen in answer.ranks)
    ((node, why),) = answer.nodes_silent
    assert node == "n2" and has_parts(why, "toy", "down")


def test_its_answer_names_commands_of_the_scheduler(answer: Evidence) -> None:
    line = typed(on_node("n1", "ls /proc/7/fd", "holder"), answer)
    assert line == "toyrun 7 n1 ls /proc/7/fd  # holder"
