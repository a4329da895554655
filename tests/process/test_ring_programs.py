"""Rings of programs that start their ranks in their own way, and of ranks that can no longer run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from .recorded_ranks import Ranks, Reply, read, until

WORK = """
import os, torch, torch.distributed as dist
def work(*_):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print("ready", flush=True)
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0, tag=5)
    dist.barrier()
"""
SPAWN = (
    WORK
    + """
import torch.multiprocessing as mp
def begin(number):
    os.environ.update(RANK=str(number), WORLD_SIZE="2")
    work()
if __name__ == "__main__":
    mp.spawn(begin, nprocs=2)
"""
)
GIL = """
import ctypes, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL
dist.barrier()
"""


def rings_of(ranks: Ranks, number: int = 0) -> list[Reply]:
    return read(*Path(ranks.record(number)["rings"]).glob("*.ring"))


def inside(ring: Reply) -> list[tuple[str, int | None]]:
    """Return (operation, peer) of the calls that the rank has not left."""
    return [(call[2], call[6]) for call in ring["open"]]


def assert_both_ranks_are_told_apart(ranks: Ranks) -> None:
    def found() -> dict[int, Reply]:
        return {
            ring["rank"]: ring for ring in rings_of(ranks) if ring["rank"] is not None and ring["recorder"]["stream"]
        }

    until(lambda: ranks.log(0).count("ready") == 2)
    until(lambda: set(found()) == {0, 1} and all(map(inside, found().values())))
    assert ("recv", 0) in inside(found()[1]) and ("barrier", None) in inside(found()[0])
    assert found()[0]["recorder"]["last_sequence"] == {"0": 2}


@pytest.mark.torch
def test_each_worker_of_torchrun_has_a_ring(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "work.py").write_text(WORK + "work()\n")
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    ranks.start([sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path / "work.py")], 1)
    assert_both_ranks_are_told_apart(ranks)


@pytest.mark.torch
def test_each_process_that_a_program_spawns_has_a_ring(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "spawn.py").write_text(SPAWN)
    ranks.start([sys.executable, str(tmp_path / "spawn.py")], 1)
    assert_both_ranks_are_told_apart(ranks)


@pytest.mark.torch
def test_the_ring_of_a_rank_that_holds_the_gil_is_read_and_its_heartbeat_stands(ranks: Ranks) -> None:
    pytest.importorskip("torch")
    ranks.start([sys.executable, "-c", GIL], 2)
    until(lambda: "ready" in ranks.log(1))
    time.sleep(11)  # longer than one beat
    held, waiting = read(ranks.live(1), ranks.live(0))
    assert inside(held) == [] and held["threads"][0]["last"][-1][2] == "all_reduce"
    assert inside(waiting)[0][0] == "barrier"
    assert waiting["heartbeat"] > held["heartbeat"] + 5
    os.kill(ranks.record(1)["pid"], signal.SIGKILL)
    assert ranks.runners[1].wait(60) == 137
    assert read(ranks.kept(1))[0]["threads"][0]["last"][-1][2] == "all_reduce"


@pytest.mark.torch
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a folder of another user")
def test_a_folder_of_another_user_is_not_used_and_the_program_runs(ranks: Ranks, tmp_path: Path) -> None:
    theirs = tmp_path / "base" / f"bsl-rings-{os.getuid()}"
    theirs.mkdir(parents=True)
    os.chown(theirs, 65534, 65534)
    ranks.start([sys.executable, "-c", "print('ran')"], 1, ring=str(theirs.parent))
    assert ranks.wait() == [0]
    assert "ran" in ranks.log(0) and list(theirs.iterdir()) == []
    assert f"{theirs} belongs to somebody else" in ranks.record(0)["why_no_rings"]
