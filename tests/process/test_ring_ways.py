"""Ranks that can no longer answer, each in its own way: their rings show the call that they are in or were in."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.hang_lab.nursery import Nursery
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.scheduler.local import Launcher
from bigsci_launch.spy.judge.last_calls import FROM_RING
from tests.support.waiting import wait_until

from .conftest import state_of
from .recorded_ranks import ForkedRanks, read

pytestmark = pytest.mark.torch
CULPRIT, PIPE = 2, "shard"
WAYS = {"killed": "", "stopped": "T", "state-d": "D", "gil": "S"}
"""How the culprit ends, and the state of its process from then on."""
BY_NUMBER = "barrier number 4"
CLAIMS = {
    "killed": (" SIGKILL", f"torch.save at <module> (train.py:22) ({FROM_RING})"),
    "stopped": (" stopped (train.py:10)", BY_NUMBER),
    "state-d": (" in the kernel (", BY_NUMBER),
    "gil": (" GIL, called from gil (train.py:11)", BY_NUMBER),
}
"""What `bsl spy` says of the culprit, and what it knows from the rings."""
PROGRAM = """
import ctypes, os, signal, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
class Disk:
    def write(self, data):
        print("ready", flush=True)
        getattr(self, way.replace("-", "_"))()
    def flush(self): pass
    def killed(self): os.kill(os.getpid(), signal.SIGKILL)
    def stopped(self): os.kill(os.getpid(), signal.SIGSTOP)
    def gil(self): ctypes.PyDLL(None).sleep(600)
    def state_d(self):  # posix_spawn waits until its child has executed a program; that first opens a pipe
        libc, actions = ctypes.CDLL(None), ctypes.create_string_buffer(256)
        libc.posix_spawn_file_actions_init(actions)
        libc.posix_spawn_file_actions_addopen(actions, 3, pipe.encode(), os.O_RDONLY, 0)
        arguments = (ctypes.c_char_p * 2)(b"true", None)
        libc.posix_spawn(ctypes.byref(ctypes.c_int()), b"/bin/true", actions, None, arguments, None)
way, pipe = sys.argv[1:]
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == 2:
    torch.save(torch.ones(2), Disk())
print("ready", flush=True)
dist.barrier()
"""


@pytest.fixture
def ranks(nursery: Nursery, tmp_path: Path) -> Iterator[ForkedRanks]:
    found = ForkedRanks(tmp_path, nursery)
    yield found
    with contextlib.suppress(OSError):  # the child of a rank in state D reads from the pipe
        os.close(os.open(tmp_path / PIPE, os.O_WRONLY | os.O_NONBLOCK))
    found.end()


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.long) if way == "state-d" else way for way in WAYS]
)
def test_the_call_that_ended_a_rank_is_shown(ranks: ForkedRanks, tmp_path: Path, way: str, size: int) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    os.mkfifo(tmp_path / PIPE)
    ranks.start([sys.executable, str(tmp_path / "train.py"), way, str(tmp_path / PIPE)], size)
    wait_until(lambda: all("ready" in ranks.log(rank) for rank in range(size)))
    wait_until(lambda: state_of(ranks.record(CULPRIT)["pid"]) == WAYS[way])
    waiting = [rank for rank in range(size) if rank != CULPRIT]
    if way == "killed":
        wait_until(lambda: all(ranks.kept(rank).exists() for rank in range(size)))
    else:
        wait_until(lambda: all(ring["open"] for ring in read(*map(ranks.live, waiting))))

    run = ranks.attempt.parent.parent
    (run / "run.json").write_text("{}")
    write_job(
        AttemptDir(ranks.attempt), JobRecord("local", 0.0, launcher=Launcher(os.getpid(), 0, socket.gethostname()))
    )
    said = CliRunner().invoke(bsl, ["trace", "last", str(run), "-n", "1"])
    first, *more = said.stdout.splitlines()
    assert first.startswith(f"rank {CULPRIT} (dp0 pp0 tp{CULPRIT}): step 0"), said.output
    assert more[0].endswith(f"not ended  torch.save, at {tmp_path}/train.py:22 <module>"), said.output

    document: dict[str, Any] = json.loads(CliRunner().invoke(bsl, ["spy", str(run), "--json"]).stdout)
    verdict = document["verdict"]
    accused = verdict["suspects"] or verdict["look_first"]
    assert [each["rank"] for each in accused] == [CULPRIT], verdict
    claim, ring = CLAIMS[way]
    assert verdict["claim"].startswith(f"rank {CULPRIT} ({socket.gethostname()}) ") and claim in verdict["claim"], (
        verdict
    )
    assert any(ring in line for line in (verdict["claim"], *verdict["evidence"])), verdict
