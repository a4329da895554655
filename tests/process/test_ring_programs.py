"""Rings of programs that start their ranks in their own way, and of ranks that can no longer run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.spy.evidence.numbering import NumberedBy
from bigsci_launch.spy.evidence.ranks import TOPOLOGY_OF_TASKS, Evidence
from bigsci_launch.spy.judge.last_calls import whereabouts
from bigsci_launch.spy.judge.waits import build_graph
from bigsci_launch.spy.look.collect import collect
from bigsci_launch.spy.look.target import Target
from bigsci_launch.spy.show.rank_facts import facts_of
from bigsci_launch.trace.last import group_ranks, words_of
from bigsci_launch.trace.read import read_copies, read_files
from tests.support.waiting import wait_until

from .conftest import state_of
from .recorded_ranks import DIAGNOSTICS, Ranks, Reply, read

WORK = """
import os, torch, torch.distributed as dist
def work(*_):
    if os.environ["RANK"] == "2":
        print("waits", flush=True), open("joins").close()  # a FIFO
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
LOOK_S = 0.3
QUICK_RUNNER = f"""
import sys
sys.path.insert(0, {str(DIAGNOSTICS)!r})
import rank_runner, rank_stacks
rank_stacks.LOOK_S = {LOOK_S}
sys.exit(rank_runner.main())
"""
GIL = f"""
import ctypes, sys, torch, torch.distributed as dist
sys.modules["ring_hook"].HEARTBEAT_S = {LOOK_S}
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
def hold_it():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL
if dist.get_rank() == 0:
    dist.barrier()
else:
    hold_it()
"""


def rings_of(ranks: Ranks, number: int = 0) -> list[Reply]:
    return read(*Path(ranks.record(number)["rings"]).glob("*.ring"))


def inside(ring: Reply) -> list[tuple[str, int | None]]:
    """Return (operation, peer) of the calls that the rank has not left."""
    return [(call[2], call[6]) for call in ring["open"]]


def assert_ranks_are_told_apart(ranks: Ranks, size: int) -> None:
    def found() -> dict[int, Reply]:
        return {
            ring["rank"]: ring for ring in rings_of(ranks) if ring["rank"] is not None and ring["recorder"]["stream"]
        }

    wait_until(lambda: ranks.log(0).count("ready") == size)
    wait_until(lambda: set(found()) == set(range(size)) and all(map(inside, found().values())))
    assert ("recv", 0) in inside(found()[1]) and ("barrier", None) in inside(found()[0])
    assert found()[0]["recorder"]["last_sequence"] == {"0": 2}


def look(ranks: Ranks, **more: object) -> Evidence:
    request = {"pid_files": str(ranks.attempt / "pids"), **more}
    return collect(Target(label="rings", request=request, attempt=AttemptDir(ranks.attempt))).evidence()


def num_joining(ranks: Ranks) -> int:
    return sum(("init_process_group", None) in inside(ring) for ring in rings_of(ranks))


def named_rings(ranks: Ranks) -> list[tuple[Path, Reply]]:
    files = sorted((ranks.attempt / "rings").glob("*.ring"))
    return list(zip(files, read(*files), strict=True))


@pytest.mark.torch
def test_each_worker_of_torchrun_has_a_ring(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "work.py").write_text(WORK + f"os.chdir({str(tmp_path)!r}); work()\n")
    options = ["--nproc-per-node", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    os.mkfifo(tmp_path / "joins")
    ranks.start([sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path / "work.py")], 1)
    wait_until(lambda: "waits" in ranks.log(0) and num_joining(ranks) == 2)
    found = look(ranks)
    assert found.ranks[-1].place == "work (work.py:5)" and not found.problems
    assert [(seen.rank, seen.numbered_by) for seen in found.ranks] == [
        (0, NumberedBy.RING),
        (1, NumberedBy.RING),
        (2, NumberedBy.ENVIRONMENT),
    ]
    assert not any(each.role == "unknown" for each in found.others)
    (tmp_path / "joins").open("w").close()
    assert_ranks_are_told_apart(ranks, 3)
    launcher = ranks.record(0)["pid"]
    found = look(ranks)
    assert [seen.rank for seen in found.ranks] == [0, 1, 2] and found.topology is None
    assert launcher not in [seen.pid for seen in found.ranks]
    assert [(each.pid, each.role) for each in found.others if each.role != "helper"] == [(launcher, "launcher")]
    assert all(seen.numbered_by is NumberedBy.RING and seen.ring and seen.threads for seen in found.ranks)
    wait = build_graph(found).waits[1]
    assert (wait.operation, wait.partner, wait.tag) == ("recv", 0, 5)

    os.kill(launcher, signal.SIGTERM)
    assert ranks.wait() != [0]
    kept = {path.name: ring for path, ring in named_rings(ranks)}
    assert set(kept) == {"rank-0000.ring", "rank-0001.ring", "rank-0002.ring"}
    assert [(ring["rank"], ring["world_size"]) for ring in kept.values()] == [(0, 3), (1, 3), (2, 3)]
    # torchrun ends rank 0 first, so the call of rank 1 may have failed before its own end.
    last = [call for thread in kept["rank-0001.ring"]["threads"] for call in thread["last"]]
    assert ("recv", 0) in [(call[2], call[6]) for call in last]
    over = Target(label="rings", request={}, attempt=AttemptDir(ranks.attempt), is_over=True, topology="tp=1,pp=1,dp=1")
    found = collect(over).evidence()
    assert [bool(seen.ring) for seen in found.ranks] == [True] * 3 and found.problems == (TOPOLOGY_OF_TASKS,)
    said_by_copies = list(words_of(group_ranks(read_copies(AttemptDir(ranks.attempt)), 1), ()))
    assert any(line.startswith("rank 1: step 0") for line in said_by_copies), said_by_copies


@pytest.mark.long
@pytest.mark.torch
def test_each_process_that_a_program_spawns_has_a_ring(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "spawn.py").write_text(SPAWN)
    ranks.start([sys.executable, str(tmp_path / "spawn.py")], 1)
    assert_ranks_are_told_apart(ranks, 2)
    assert [(seen.rank, seen.numbered_by) for seen in look(ranks).ranks] == [
        (0, NumberedBy.RING),
        (1, NumberedBy.RING),
    ]
    for ring in Path(ranks.record(0)["rings"]).glob("*.ring"):
        os.kill(int(ring.stem), signal.SIGKILL)  # they outlive the program that has started them


HELD = "hold_it (<string>:8)"


@pytest.mark.torch
def test_a_rank_that_holds_the_gil_writes_its_stacks_and_one_that_is_stopped_does_not(ranks: Ranks) -> None:
    pytest.importorskip("torch")
    ranks.runner = ["-c", QUICK_RUNNER]
    ranks.start([sys.executable, "-c", GIL], 2)
    wait_until(lambda: "ready" in ranks.log(1) and bool(inside(read(ranks.live(0))[0])))
    untouched = ranks.live(0).with_suffix(".stacks").stat().st_mtime_ns
    os.kill(ranks.record(0)["pid"], signal.SIGSTOP)
    wait_until(lambda: "stacks" in read(ranks.live(1))[0])
    time.sleep(6 * LOOK_S)
    held, stopped = read(ranks.live(1), ranks.live(0))
    assert inside(held) == [] and held["threads"][0]["last"][-1][2] == "all_reduce"
    assert "line 8 in hold_it" in held["stacks"]["text"] and held["stacks"]["written"] > held["heartbeat"] + LOOK_S
    assert inside(stopped)[0][0] == "barrier" and "stacks" not in stopped

    os.kill(ranks.record(0)["pid"], signal.SIGCONT)
    wait_until(lambda: read(ranks.live(0))[0]["heartbeat"] > stopped["heartbeat"])
    waiting, held = read(ranks.live(0), ranks.live(1))
    assert ranks.live(0).with_suffix(".stacks").stat().st_mtime_ns == untouched
    assert "stacks" not in waiting and waiting["heartbeat"] > held["heartbeat"] + LOOK_S
    assert state_of(ranks.record(1)["pid"]) == "S", "the signal has not woken it"
    evidence = look(ranks, py_spy="/no/py-spy")
    assert not evidence.ranks[1].threads and HELD in whereabouts(evidence.ranks[1])
    assert "py-spy is not installed" in (why := evidence.ranks[1].why_unreadable or "") and HELD in why
    stacks = [words for name, words in facts_of(evidence.ranks[1], evidence) if name == "stack"]
    assert len(stacks) == 1 and re.match(rf"{re.escape(HELD)} < <module> \(<string>:12\) .*\d+ s", stacks[0]), stacks

    os.kill(ranks.record(1)["pid"], signal.SIGKILL)
    assert ranks.runners[1].wait(180) == 137
    copy = read(ranks.kept(1))[0]
    assert copy["threads"][0]["last"][-1][2] == "all_reduce" and copy["stacks"] == held["stacks"]
    assert whereabouts(look(ranks).ranks[1]).startswith(f"was in {HELD} (from ")
    told = list(words_of(group_ranks(read_copies(AttemptDir(ranks.attempt)), 1), ()))
    assert any("no thread could" in line and HELD in line for line in told), told


RENAMED = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
out, own = torch.zeros(4), torch.ones(4)
def step():
    dist.all_gather_into_tensor(out, own)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(out, own)
    dist.reduce_scatter_tensor(out, own)
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(out, own)
step()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.torch
def test_collectives_with_a_new_name_are_recorded_once_where_the_program_calls_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    given = {"BSL_RING_DIR": str(tmp_path), "PYTHONPATH": str(DIAGNOSTICS / "ring_site")}
    subprocess.run([sys.executable, "-c", RENAMED], env={**os.environ, **given}, timeout=300, check=False)
    (rank,) = read_files(tmp_path.glob("*.ring"))
    assert rank.ring is not None
    assert [(call.operation, call.place) for call in rank.ring.calls if call.number] == [
        ("all_gather_into_tensor", "<string>:6 step"),
        ("all_gather_into_tensor", "<string>:7 step"),
        ("reduce_scatter_tensor", "<string>:8 step"),
        ("reduce_scatter_tensor", "<string>:9 step"),
    ]
