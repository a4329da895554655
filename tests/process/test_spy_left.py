"""What launchers leave behind: orphans, processes that were not reaped, and a launcher whose ranks have all ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.spy.evidence.ranks import read_evidence
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import State
from tests.support.waiting import wait_until

LAUNCHER = """
import os, subprocess, sys, time
for rank, code in enumerate(sys.argv[1:]):
    program = f"import sys, time; time.sleep(1000) if {code} < 0 else sys.exit({code})"
    environment = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(len(sys.argv) - 1), MASTER_PORT="29500")
    subprocess.Popen([sys.executable, "-c", program], env=environment)
time.sleep(1000)
"""
RUNS = "-1"


@pytest.fixture
def launch_all() -> Iterator[Callable[..., int]]:
    """`launch_all("-1", "3")` starts a launcher of two ranks: one that stays, and one that ends with 3."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*codes: str) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", LAUNCHER, *codes], start_new_session=True))
        pid = started[-1].pid
        num_ended = sum(code != RUNS for code in codes)
        wait_until(lambda: len(children(pid)) == len(codes) and states(pid).count("Z") == num_ended)
        return pid

    yield run
    for launcher in started:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def states(pid: int) -> list[str]:
    return [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] for child in children(pid)]


def test_orphans_of_a_launcher_are_found(launch_all: Callable[..., int], ask_agent: Callable[..., Any]) -> None:
    pid = launch_all(RUNS, RUNS)
    ranks = set(map(int, children(pid)))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    document = ask_agent(launcher_pid=pid)
    assert {rank["pid"] for rank in document["ranks"]} == ranks
    assert document["found_by"] == f"left by {pid}"


def test_how_a_rank_has_ended(launch_all: Callable[..., int], ask_agent: Callable[..., Any]) -> None:
    evidence = read_evidence({}, [ask_agent(launcher_pid=launch_all(RUNS, "3", RUNS))])
    assert [seen.exit.code if seen.exit else None for seen in evidence.ranks] == [None, 3, None]
    assert evidence.ranks[0].store.endswith(":29500")


@pytest.mark.parametrize(("code", "state"), [("0", State.FINISHED), ("5", State.CRASHED)])
def test_a_launcher_whose_ranks_have_ended_is_no_rank(
    launch_all: Callable[..., int], ask_agent: Callable[..., Any], code: str, state: State
) -> None:
    evidence = read_evidence({}, [ask_agent(launcher_pid=launch_all("0", code))])
    assert (evidence.ranks, judge(evidence).state) == ((), state)
