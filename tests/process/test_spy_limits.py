"""What a look costs: CPU time of a node's agent, time with unreadable processes, size of the evidence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.hang_lab.needs import CHECKS
from bigsci_launch.hang_lab.stage import set_stage
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

AskAgent = Callable[..., dict[str, Any]]
CPU_LIMIT_S = 1.0
TIME_LIMIT_S = 7.0
"""Five seconds on a machine of its own. Others may use the cores for a while, so that it is looked at again."""
BYTES_PER_RANK = 10_000
# Inherits the processes that the agent leaves behind, so that their CPU time is counted too.
COUNT_CPU = """
import ctypes, os, resource, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
done = subprocess.run(sys.argv[1:], capture_output=True, check=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""


def test_eight_healthy_ranks_cost_less_than_a_second_of_cpu(launch: Any, agent_path: Path) -> None:
    """All of them move, so the stacks of each are read twice."""
    launched = launch("hung_rank.py", ["train_step {ready}"] * 8)
    agent = [sys.executable, "-I", "-S", str(agent_path), json.dumps({"launcher_pid": launched.pid})]
    argv = [sys.executable, "-c", COUNT_CPU, *agent]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    assert float(done.stdout) < CPU_LIMIT_S, "0.15 s on a machine that is free"


def test_the_evidence_of_a_rank_is_small(launch: Any, tmp_path: Path) -> None:
    launched = launch("hung_rank.py", ["train_step {ready}"] * 7 + ["wait_for_lock {ready}"])
    argv = [sys.executable, "-m", "bigsci_launch", "spy", "--pid", str(launched.pid), "--output", "evidence", "--json"]
    subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    size = sum(path.stat().st_size for path in (tmp_path / "evidence").rglob("*.json"))
    assert size / 8 < BYTES_PER_RANK


@pytest.fixture(scope="module")
def frozen_disk() -> Iterator[str]:
    why = CHECKS["root"]() or CHECKS["loop device"]()
    if why:
        pytest.skip(why)
    with set_stage("frozen-disk") as stage:
        assert stage is not None
        yield stage.surroundings.variables["BSL_LAB_STAGE"]


def test_a_process_in_the_kernel_and_one_that_hangs_its_readers_cost_five_seconds(
    frozen_disk: str, launch: Any, ask_agent: AskAgent, tmp_path: Path
) -> None:
    places = ["train_step", "hold_memory_map", "read_shard", *["train_step"] * 5]
    launched = launch("hung_rank.py", [f"{place} {{ready}}" for place in places], FROZEN_DISK=frozen_disk)
    pids = launched.descendants()[: len(places)]
    write_pid_files(tmp_path, pids)
    try:
        found = wait_until(lambda: (one := ask_agent(pid_files=str(tmp_path)))["wall_s"] < TIME_LIMIT_S and one)
    finally:
        os.kill(pids[1], signal.SIGKILL)  # it dies as soon as the disk is thawed
    first = {places[rank["rank"]]: rank["samples"][0] for rank in found["ranks"]}
    assert has_parts(first["hold_memory_map"]["why"], "py-spy", "no answer in ")
    assert {first["hold_memory_map"]["state"], *states_of_threads(first["hold_memory_map"])} == {"D"}
    assert (first["read_shard"]["state"], "stack" in first["read_shard"]) == ("D", True)
    assert all("stack" in rank["samples"][0] for rank in found["ranks"] if places[rank["rank"]] == "train_step")


def states_of_threads(sample: dict[str, Any]) -> list[str]:
    return [thread["state"] for thread in sample["blocked_threads"]]


def write_pid_files(folder: Path, pids: list[int]) -> None:
    """Write what a launcher writes: a process that blocks its readers cannot be found in any other way."""
    host = os.uname().nodename
    for rank, pid in enumerate(pids):
        document = {"rank": rank, "node": host, "host": host, "pid": pid}
        (folder / f"rank-{rank:04d}.json").write_text(json.dumps(document))
