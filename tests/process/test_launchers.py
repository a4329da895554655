"""`slurm.ranks_per_task` on this machine: real launchers, whose workers are the ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import run_bsl
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

LAUNCH = str(Path(__file__).parent / "programs" / "launch_workers.py")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
PRELUDE = """
import os, signal, sys, time
RANK = int(os.environ["RANK"])
os.write(1, b"up %d\\n" % os.getpid())  # two workers may write to one pipe
"""
WAIT = "time.sleep(600)\n"


class Launched:
    """A run of 4 ranks, which one launcher starts, or two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempt = folder / "runs" / "run" / "attempts" / "0001"

    def bsl(self, *words: str, rc: int = 0) -> str:
        return run_bsl(self.folder, *words, rc=rc).stdout

    def submit(self, program: str, *command: str, each: int = 4, rc: int = 0, wait: bool = True) -> None:
        (self.folder / "train.py").write_text(PRELUDE + program)
        config = {
            "run": {"name": "run", "command": list(command) or [sys.executable, LAUNCH, "train.py"]},
            "slurm": {"site": "local", "ranks_per_task": each},
            "parallelism": {"tensor_parallel_size": 2, "data_parallel_size": 2},
        }
        (self.folder / "run.yaml").write_text(json.dumps(config))
        self.bsl("submit", "run.yaml", *([] if wait else ["--detach"]), rc=rc)

    def record(self, name: str) -> Any:
        return json.loads((self.attempt / f"{name}.json").read_text())

    def log(self, name: str) -> str:
        path = self.attempt / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_ranks(self) -> list[int]:
        """Wait for all ranks; return the PIDs of their programs and of all runners and launchers."""
        wait_until(lambda: all("up " in self.log(f"rank-{rank:04d}") for rank in range(4)))
        records = [json.loads(path.read_text()) for path in (self.attempt / "pids").glob("*.json")]
        return [record[kind] for record in records for kind in ("pid", "runner_pid")]

    def signal(self, number: int) -> None:
        os.kill(self.record("job")["launcher"]["pid"], number)

    def wait_for_end(self) -> Any:
        wait_until(lambda: (self.attempt / "exit.json").exists() and self.record("exit")["exit_code"] is not None)
        return self.record("exit")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Launched]:
    run = Launched(tmp_path)
    yield run
    if (run.attempt / "job.json").exists() and not (run.attempt / "exit.json").exists():
        for _ in range(2):
            with suppress(ProcessLookupError):
                run.signal(signal.SIGTERM)


def has_ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def first_failure(document: dict[str, Any]) -> tuple[Any, ...]:
    failure = document["first_failure"]
    return failure["rank"], failure["signal"], failure["code"]


def test_workers_are_the_ranks_and_the_launcher_is_none(run: Launched) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "PET_NPROC_PER_NODE", "PET_NNODES", "PET_NODE_RANK", "NODE_RANK"]
    same = "os.environ['MASTER_PORT'] == os.environ['PET_MASTER_PORT'], 'BSL_WORKER_RUNNER' in os.environ"
    run.submit(f"print(*(os.environ[name] for name in {names}), {same}, sys.argv)", each=2)
    for rank in range(4):
        assert run.log(f"rank-{rank:04d}").endswith(
            f" {rank} {rank % 2} 4 2 2 {rank // 2} {rank // 2} True False ['train.py']\n"
        )
    assert [run.log(f"launcher-{number:04d}").count("launching None 4 2\n") for number in (0, 1)] == [1, 1]
    ended = run.record("exit")
    assert (ended["reason"], ended["num_started"], ended["world_size"]) == ("finished", 4, 4)
    ranks = [run.record(f"pids/rank-{rank:04d}") for rank in range(4)]
    assert [(each["launcher"], each["local_rank"]) for each in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert ranks[3]["coordinate"] == {"pp": 0, "tp": 1, "dp": 1}
    assert all(f"up {each['pid']}\n" in run.log(f"rank-{each['rank']:04d}") for each in ranks)
    logs = run.bsl("logs", "run").splitlines()
    assert {has_parts(line, "launcher 1]", "launching") for line in logs} == {True, False}
    assert any(has_parts(line, "rank 3 dp1 pp0 tp1] up ") for line in logs)
    assert "launcher" not in run.bsl("logs", "run", "--rank", "0-3")


@pytest.mark.parametrize(
    "session", [[], pytest.param(["one-session"], marks=pytest.mark.long)], ids=["own sessions", "one session"]
)
def test_a_worker_that_fails_is_the_first_failure(run: Launched, session: list[str]) -> None:
    run.submit(f"if RANK == 3:\n    sys.exit(41)\n{WAIT}", sys.executable, LAUNCH, *session, "train.py", rc=41)
    ended = run.record("exit")
    assert (ended["reason"], ended["exit_code"], ended["failed_ranks"]) == ("crashed", 41, [3])
    assert first_failure(ended) == (3, None, 41)
    others = [run.record(f"exits/rank-{rank:04d}") for rank in range(3)]
    assert {(each["signal"], each["terminated"] is not None) for each in others} == {("SIGTERM", True)}
    assert "first [None, None, None, 41] then [-15, -15, -15, 41]" in run.log("launcher-0000")
    assert (run.record("exits/launcher-0000")["code"], run.record("exits/launcher-0000")["launcher"]) == (1, 0)


def test_the_launcher_sees_the_signal_that_ends_a_worker(run: Launched) -> None:
    run.submit(f"if RANK == 1:\n    os.kill(os.getpid(), signal.SIGSEGV)\n{WAIT}", rc=139)
    assert first_failure(run.record("exit")) == (1, "SIGSEGV", None)
    assert "first [None, -11, None, None]" in run.log("launcher-0000")


def test_a_worker_that_is_started_again_has_not_ended(run: Launched) -> None:
    fails_once = "if RANK == 2 and not os.path.exists('mark'):\n    open('mark', 'w')\n    sys.exit(3)\n"
    run.submit(fails_once + WAIT, sys.executable, LAUNCH, "twice", "train.py", wait=False)
    wait_until(lambda: all(run.log(f"rank-{rank:04d}").count("up ") == 2 for rank in range(4)))
    assert list((run.attempt / "exits").glob("rank-*.json")) == []
    assert f"up {run.record('pids/rank-0002')['pid']}\n" in run.log("rank-0002").splitlines(keepends=True)[-1]
    run.signal(signal.SIGTERM)
    assert run.wait_for_end()["reason"] == "cancelled"


STOP = "signal.signal(signal.SIGUSR2, lambda *_: (print('asked'), sys.exit(0)))\n"


def test_the_request_to_stop_reaches_the_workers_alone(run: Launched) -> None:
    run.submit(f"{STOP}print('ready', flush=True)\n{WAIT}", each=2, wait=False)
    run.wait_for_ranks()
    wait_until(lambda: all("ready" in run.log(f"rank-{rank:04d}") for rank in range(4)))
    run.signal(signal.SIGUSR2)
    ended = run.wait_for_end()
    assert (ended["reason"], ended["exit_code"]) == ("stopped", 0)
    assert all(run.log(f"rank-{rank:04d}").endswith("Z asked\n") for rank in range(4))


@pytest.mark.parametrize(
    "session", [pytest.param([], marks=pytest.mark.long), ["one-session"]], ids=["own sessions", "one session"]
)
def test_nothing_is_left_of_a_run_that_is_cancelled(run: Launched, session: list[str]) -> None:
    run.submit(WAIT, sys.executable, LAUNCH, *session, "train.py", wait=False)
    pids = run.wait_for_ranks()
    run.signal(signal.SIGTERM)
    assert run.wait_for_end()["reason"] == "cancelled"
    wait_until(lambda: has_ended(pids))


def test_nothing_is_left_of_a_launcher_that_is_killed(run: Launched) -> None:
    run.submit(WAIT, wait=False)
    pids = run.wait_for_ranks()
    os.kill(run.record("pids/launcher-0000")["pid"], signal.SIGKILL)
    ended = run.wait_for_end()
    assert (ended["reason"], ended["exit_code"], ended["first_failure"]) == ("crashed", 137, None)
    assert has_parts(ended["cause"], "launcher 0 on ", "SIGKILL")
    wait_until(lambda: has_ended(pids))


def test_a_launcher_that_starts_nothing_says_why(run: Launched) -> None:
    run.submit("", sys.executable, LAUNCH.replace("launch_workers", "missing"), rc=2)
    ended = run.record("exit")
    assert (ended["reason"], ended["exit_code"], ended["num_started"]) == ("launch_failed", 2, 0)
    assert has_parts(ended["cause"], "launcher 0 on ", "exit code 2", "missing.py", "No such file")


TRACEBACK = """[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 7, in <module>
[rank3]: ValueError: no such shard"""


def test_a_launcher_that_cannot_be_started_is_named(run: Launched) -> None:
    run.submit("", "./missing-launcher", rc=127)
    ended = run.record("exit")
    assert (ended["reason"], ended["exit_code"]) == ("launch_failed", 127)
    assert has_parts(ended["cause"], "launcher 0 on ", "cannot start ./missing-launcher")


def test_without_the_hook_the_log_of_the_launcher_names_the_rank(run: Launched) -> None:
    raises = f"if RANK == 3:\n    print({TRACEBACK!r}, flush=True)\n    sys.exit(1)\n"
    run.submit(raises + WAIT, "env", "-u", "PYTHONPATH", sys.executable, LAUNCH, "train.py", rc=1)
    ended = run.record("exit")
    assert (ended["reason"], ended["num_started"], ended["failed_ranks"]) == ("crashed", 0, [3])
    assert has_parts(ended["first_failure"]["error"], "no such shard")
    assert ended["first_failure"]["node"] == os.uname().nodename


def test_workers_of_another_world_run_without_records(run: Launched) -> None:
    command = f"exec env WORLD_SIZE=8 {sys.executable} {LAUNCH} train.py"
    run.submit("", "bash", "-c", command)
    assert run.record("exit")["num_started"] == 0
    log = run.log("launcher-0000")
    assert log.count("up ") == 4 and has_parts(log, "rank 3", "8 ranks", "4")


RING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
def load_batch():
    print("ready", flush=True)
    time.sleep(600)
if RANK == 3:
    load_batch()
print("ready", flush=True)
dist.barrier()
"""


@pytest.mark.torch
def test_torchrun_needs_no_options_and_a_rank_that_hangs_is_named(run: Launched) -> None:
    run.submit(RING, TORCHRUN, "train.py", wait=False)
    wait_until(lambda: all("ready" in run.log(f"rank-{rank:04d}") for rank in range(4)))
    spied = json.loads(run.bsl("spy", "run", "--json"))
    assert [(each["rank"], each["numbered_by"]) for each in spied["ranks"]] == [(rank, "pid file") for rank in range(4)]
    [first] = spied["verdict"]["look_first"]
    assert first["rank"] == 3 and "load_batch" in first["why"]
    assert json.loads(run.bsl("status", "run", "--json"))["num_ranks_started"] == 4
    run.signal(signal.SIGTERM)
    assert run.wait_for_end()["reason"] == "cancelled"
    assert sorted(path.name for path in (run.attempt / "rings").glob("*.ring")) == [
        f"rank-{rank:04d}.ring" for rank in range(4)
    ]
