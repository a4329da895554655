"""Attempts that are examined on the login node, and those that are left alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.nodes.evaluate import OLDEST_S, evaluate_run
from bigsci_launch.nodes.memory import read_nodes
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import AttemptDir, RunDir, node_memory, write_json
from bigsci_launch.scheduler.job import format_comment
from tests.support.texts import CheckText, without_ages


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "runs" / "demo")
    write_json(found.record, {"name": "demo"})
    return found


def attempt_of(run: RunDir, name: str = "0001") -> AttemptDir:
    """An attempt of two nodes whose script died with its host n0: the ranks of n1 were told to end."""
    attempt = run.attempt(name)
    attempt.make()
    write_job(attempt, JobRecord("slurm", time.time(), job_id="77", cluster="jean"))
    for rank, node in ((0, "n0"), (1, "n1")):
        record = {"rank": rank, "node": node, "coordinate": None}
        write_json(attempt.pid_file(rank), {**record, "pid": 5, "started": time.time()})
    ended = {"rank": 1, "node": "n1", "code": None, "signal": "SIGTERM", "time": time.time(), "terminated": time.time()}
    write_json(attempt.exit_file(1), ended)
    return attempt


def states(fake_slurm: Callable[..., Any], run: RunDir, state: str, node_state: str) -> Any:
    slurm = fake_slurm("squeue", "sinfo")
    comment = format_comment(str(run.path))
    slurm.answer("squeue", f"77|{state}|alice|debug|2|n[0-1]|None|N/A|N/A|1:00|N/A|demo|{comment}\n")
    slurm.answer("sinfo", f"n0|{node_state}|Not responding\nn1|idle|none\n")
    return slurm


def test_a_lost_batch_host(run: RunDir, fake_slurm: Callable[..., Any], check_text: CheckText) -> None:
    attempt_of(run)
    slurm = states(fake_slurm, run, "NODE_FAIL", "down*")
    [line] = evaluate_run(run)
    check_text(without_ages(line))
    [entry] = read_nodes(node_memory(run.path.parent))
    assert (entry.node, entry.reason, entry.cluster, entry.rank) == ("n0", "lost", "jean", 0)
    asked = len(slurm.calls("squeue"))
    assert evaluate_run(run) == [] and len(slurm.calls("squeue")) == asked, "it is examined once"


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETING"])
def test_an_attempt_that_has_not_ended_is_left_alone(run: RunDir, fake_slurm: Callable[..., Any], state: str) -> None:
    attempt = attempt_of(run)
    states(fake_slurm, run, state, "down*")
    assert evaluate_run(run) == [] and not attempt.bad_nodes.exists()


def test_an_attempt_with_another_one_queued_behind_it_has_not_ended(
    run: RunDir, fake_slurm: Callable[..., Any]
) -> None:
    attempt = attempt_of(run)
    behind = run.attempt("0002")
    behind.make()
    write_job(behind, JobRecord("slurm", time.time(), job_id="78", cluster="jean"))
    states(fake_slurm, run, "RUNNING", "down*")
    assert evaluate_run(run) == [] and not attempt.bad_nodes.exists()
    attempt_of(run, "0001.r1")
    assert evaluate_run(run) and attempt.bad_nodes.exists(), "a later start of the same job says that this one is over"


def test_an_attempt_about_which_slurm_does_not_answer_is_left_alone(
    run: RunDir, fake_slurm: Callable[..., Any]
) -> None:
    attempt = attempt_of(run)
    states(fake_slurm, run, "NODE_FAIL", "down*").answer("squeue", stderr="Unable to contact slurm controller", rc=1)
    assert evaluate_run(run) == [] and not attempt.bad_nodes.exists()


def test_a_node_that_is_down_but_not_why_the_job_ended_is_not_called_lost(
    run: RunDir, fake_slurm: Callable[..., Any]
) -> None:
    attempt = attempt_of(run)
    write_json(attempt.exit_file(0), {"rank": 0, "node": "n0", "code": 5, "signal": None, "time": time.time()})
    states(fake_slurm, run, "FAILED", "down*")
    assert evaluate_run(run) == [] and not node_memory(run.path.parent).exists()


def test_an_attempt_that_is_too_old_is_not_examined(run: RunDir, fake_slurm: Callable[..., Any]) -> None:
    attempt = attempt_of(run)
    slurm = states(fake_slurm, run, "NODE_FAIL", "down*")
    old = time.time() - OLDEST_S - 60
    os.utime(attempt.path, (old, old))
    assert evaluate_run(run) == [] and slurm.calls("squeue") == []


def test_a_local_attempt_has_no_nodes(run: RunDir) -> None:
    attempt = attempt_of(run)
    write_job(attempt, JobRecord("local", time.time()))
    assert evaluate_run(run) == []
