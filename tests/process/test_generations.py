"""Jobs with `survive`: a real controller, real runners and ranks, which are killed."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.config.load import dump_resolved, load_run
from bigsci_launch.procfs import start_ticks
from bigsci_launch.runs.control.request import OF_CONTROLLER, Request, put_request, read_answer, read_requests
from bigsci_launch.runs.layout import AttemptDir
from tests.support.listening import listeners
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

from .generation_job import PRELUDE, PROGRAMS, ROOT, Job, job_in

WAIT = "time.sleep(600)\n"
# Nobody continues before rank 0 has printed its line, and its runner has had time to write it.
TOGETHER = """
if RANK == 0: open(f"generation-{GENERATION}", "w").close()
while not os.path.exists(f"generation-{GENERATION}"): time.sleep(0.05)
time.sleep(0.3)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with job_in(tmp_path) as job:
        yield job


@pytest.fixture(scope="module", autouse=True)
def paused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, list[int], float]]:
    """A job that stands still while other tests run, its processes, and since when."""
    with job_in(tmp_path_factory.mktemp("paused")) as job:
        pids = pause(job, lambda pid: True)
        yield job, pids, time.monotonic()
        for pid in job.processes():  # where the test that lets them continue was left out
            os.kill(pid, signal.SIGKILL)


def test_a_job_continues_after_a_killed_rank_and_a_failed_one(job: Job) -> None:
    job.write(
        "if RANK == 0: print(' iteration  %d/ 10 | loss: 1.0' % (GENERATION + 5), flush=True)\n"
        + TOGETHER
        + "if (GENERATION, RANK) == (0, 2): os.kill(os.getpid(), 9)\n"
        "if (GENERATION, RANK) == (1, 1): print('KeyError: 7'); sys.exit(41)\n"
        "if GENERATION < 2: time.sleep(600)\n"
    )
    job.submit()
    assert job.end() == 0, job.output
    assert [record["event"] for record in job.records()] == ["began", "failed", "ended"] * 2 + ["began", "finished"]
    failed = job.records("failed")
    assert [(each["kind"], each["rank"], each["code"], each["signal"], each["words"]) for each in failed] == [
        ("died", 2, None, "SIGKILL", None),
        ("died", 1, 41, None, "KeyError: 7"),
    ]
    assert [record["step"] for record in job.records("ended")] == [5, 6]
    assert all(0 <= each["noticed"] - each["died"] < 2 for each in failed)
    ended = job.exit()
    assert (ended["reason"], ended["exit_code"], ended["failed_ranks"]) == ("finished", 0, [])
    assert ended["world_size"] == 4
    left = json.loads((job.attempt / "recover" / "gen-000" / "exits" / "rank-0002.json").read_text())
    assert left["signal"] == "SIGKILL"
    assert all(f"up {generation} 4" in job.log(3) for generation in range(3))
    wait_until(lambda: not job.processes())


def test_strangers_at_the_controllers_port_end_nothing_and_are_counted(job: Job) -> None:
    job.write("while not os.path.exists('enough'): time.sleep(0.05)\n", dp=2)
    job.submit()
    job.wait_for("began")
    (listener,) = listeners(job.processes())
    for data in (b'{"say":"hello","token":"x","slot":1e999}\n', b"[" * 200_000 + b"\n", b'{"slot":"\\ud800"}\n'):
        with socket.create_connection((listener.place, listener.port), timeout=5) as link, contextlib.suppress(OSError):
            link.sendall(data)
            while link.recv(4096):
                continue
    (job.folder / "enough").touch()
    assert job.end() == 0, job.output
    assert [record["event"] for record in job.records()] == ["began", "finished"]
    argv = [sys.executable, "-m", "bigsci_launch", "status", "runs/run"]
    text, document = (
        subprocess.run([*argv, *more], cwd=job.folder, capture_output=True, text=True, check=True).stdout
        for more in ([], ["--json"])
    )
    found = json.loads(document)["strangers"]
    assert (found["survive"], found["node_check"], found["newest"]["host"]) == (3, None, "127.0.0.1")
    assert has_parts(text, "survive", "127.0.0.1")


def test_runners_of_an_earlier_version_are_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "rank_runner.py").touch()
    options = ("--attempt-dir", str(tmp_path), "--level", "restart", "--slots", "1")
    command = ("--", sys.executable, str(tmp_path / "rank_runner.py"))
    argv = [sys.executable, "-m", "bigsci_launch.recover.controller", *options, *command]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "door.py" in done.stderr


def test_three_short_generations_in_a_row_end_the_job_with_the_reason(job: Job) -> None:
    job.write(
        "if (GENERATION, RANK) == (0, 0): print(' iteration  3/ 10 | loss: 1.0', flush=True)\n"
        + TOGETHER
        + "if RANK == 1: print('KeyError: 7'); sys.exit(41)\n"
        + WAIT
    )
    job.submit()
    assert job.end() == 41, job.output
    assert [record["step"] for record in job.records("ended")] == [3, None, None], "later ones told none"
    (gave_up,) = job.records("gave_up")
    assert (gave_up["generation"], gave_up["exit_code"], gave_up["rank"]) == (2, 41, 1)
    assert gave_up["why"].endswith("rank 1 on " + os.uname().nodename + " died (exit code 41): KeyError: 7")
    first = job.exit()["first_failure"]
    assert (job.exit()["reason"], first["rank"], first["code"], first["error"]) == ("crashed", 1, 41, "KeyError: 7")
    wait_until(lambda: not job.processes())


def test_a_job_that_is_told_to_end_ends_and_recovers_nothing(job: Job) -> None:
    job.write("signal.signal(15, lambda *_: (print('saving', flush=True), sys.exit(0)))\n" + WAIT)
    process = job.submit()
    wait_until(lambda: all("up 0 4" in job.log(rank) for rank in range(4)))
    process.send_signal(signal.SIGINT)
    assert job.end() == 130, job.output
    assert job.exit()["reason"] == "cancelled"
    assert all(job.log(rank).count("saving") == 1 for rank in range(4))
    assert [record["event"] for record in job.records()] == ["began", "gave_up"]
    wait_until(lambda: not job.processes())


def test_ranks_that_slurm_tells_to_end_are_told_once_and_may_take_their_time(job: Job) -> None:
    """Slurm tells every process of the job. The controller then has nothing to add."""
    slowly = "(print('saving', flush=True), time.sleep(2), sys.exit(0))"
    program = PRELUDE + f"signal.signal(15, lambda *_: {slowly})\n" + WAIT
    job.start_step(1, 2, "restart", sys.executable, "-c", program, dp=2)
    wait_until(lambda: all("up 0 2" in job.log(rank) for rank in range(2)))
    assert job.process is not None
    job.process.terminate()
    for rank in range(2):
        os.killpg(job.pid(rank, "runner_pid"), signal.SIGTERM)
    assert job.end() == 0, job.output
    assert [job.log(rank).count("saving") for rank in range(2)] == [1, 1]


PAUSE_S = 17.0
"""Longer than the lease of a slot, and than the time after which a stopped process is killed."""


def is_controller(pid: int) -> bool:
    return b"bigsci_launch.recover.controller" in (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")


def is_runner(pid: int) -> bool:
    words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
    return not is_controller(pid) and any(word.endswith(b"/rank_runner.py") for word in words)


def pause(job: Job, stopped: Callable[[int], bool]) -> list[int]:
    """Start a job, stop those of its processes that are chosen, and return them."""
    job.write("while not os.path.exists('enough'): time.sleep(0.05)\n", dp=2)
    launched = job.submit()
    wait_until(lambda: all("up 0 2" in job.log(rank) for rank in range(2)))
    paused = [pid for pid in job.processes() if pid != launched.pid and stopped(pid)]
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    return paused


def require_no_loss(job: Job, paused: list[int]) -> None:
    assert paused
    for pid in paused:
        os.kill(pid, signal.SIGCONT)
    time.sleep(3.0)
    (job.folder / "enough").touch()
    assert job.end() == 0, job.output
    assert [record["event"] for record in job.records()] == ["began", "finished"]
    assert job.exit()["reason"] == "finished"


@pytest.mark.long
@pytest.mark.parametrize("stopped", [is_controller, is_runner, lambda pid: not is_controller(pid)])
def test_a_pause_of_a_part_is_no_loss(stopped: Callable[[int], bool], job: Job) -> None:
    paused = pause(job, stopped)
    time.sleep(PAUSE_S)
    require_no_loss(job, paused)


def test_no_rank_outlives_its_controller(job: Job) -> None:
    job.start_step(1, 2, "restart", sys.executable, "-c", PRELUDE + WAIT, dp=2)
    wait_until(lambda: all("up 0 2" in job.log(rank) for rank in range(2)))
    assert job.process is not None
    pids = [job.pid(rank, which) for rank in range(2) for which in ("pid", "runner_pid")]
    job.process.kill()
    wait_until(lambda: not any(start_ticks(pid) for pid in pids))


def test_a_killed_runner_is_started_again_and_nothing_of_its_rank_is_left(job: Job) -> None:
    """The rank has started a process in a session of its own, which outlives it."""
    job.write(
        "from subprocess import Popen\n"
        "if GENERATION == 0: print('child', Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
        "while not os.path.exists('enough'): time.sleep(0.05)\n",
        dp=2,
    )
    job.submit()
    wait_until(lambda: all("child" in job.log(rank) and job.has_pid(rank) for rank in range(2)))
    child, runner = int(job.log(1).split("child ")[1].split()[0]), job.pid(1, "runner_pid")
    os.kill(runner, signal.SIGKILL)
    again = job.wait_for("began", 2)
    assert [member["slot"] for member in again["members"]] == [0, 1]
    wait_until(lambda: "up 1 2" in job.log(1))
    wait_until(lambda: job.pid(1, "runner_pid") != runner)
    assert start_ticks(child) is None
    (job.folder / "enough").touch()
    assert job.end() == 0, job.output
    assert [record["event"] for record in job.records()] == ["began", "failed", "ended", "began", "finished"]
    (failed,) = job.records("failed")
    assert (failed["kind"], failed["rank"], failed["slot"]) == ("lost_runner", 1, 1)
    wait_until(lambda: not job.processes())


@pytest.mark.parametrize(("options", "code"), [((), 1), (("--step",), 127)])
def test_runners_that_cannot_be_started_do_not_end_the_controller_with_an_exception(
    job: Job, options: tuple[str, ...], code: int
) -> None:
    config = load_run(job.write("pass", dp=2)).config
    job.attempt.mkdir(parents=True)
    (job.attempt / "config.yaml").write_text(dump_resolved(config))
    words = ("--attempt-dir", str(job.attempt), "--level", "restart", "--slots", "2", *options, "--")
    argv = [sys.executable, "-I", "-m", "bigsci_launch.recover.controller", *words, str(job.folder / "gone"), "--"]
    job._start(argv)
    assert job.end() == code, job.output
    assert job.output.count("cannot be started") == (1 if options else 2) and "Traceback" not in job.output


@pytest.mark.long
def test_a_runner_that_cannot_be_started_again_is_tried_again_later(job: Job) -> None:
    job.write("while not os.path.exists('enough'): time.sleep(0.05)\n", dp=2)
    job.submit()
    wait_until(lambda: all("up 0 2" in job.log(rank) and job.has_pid(rank) for rank in range(2)))
    runner = job.pid(1, "runner_pid")
    controller = int(Path(f"/proc/{runner}/stat").read_text().rpartition(")")[2].split()[1])
    _, hard = resource.prlimit(controller, resource.RLIMIT_NOFILE)
    resource.prlimit(controller, resource.RLIMIT_NOFILE, (3, hard))
    os.kill(runner, signal.SIGKILL)
    wait_until(lambda: "runner of slot 1 cannot be started" in (job.attempt / "job.out").read_text())
    resource.prlimit(controller, resource.RLIMIT_NOFILE, (hard, hard))
    wait_until(lambda: "up 1 2" in job.log(1))
    (job.folder / "enough").touch()
    assert job.end() == 0, job.output


@pytest.mark.long
def test_the_runner_of_the_only_slot_is_started_again(job: Job) -> None:
    job.write("while not os.path.exists('enough'): time.sleep(0.05)\n", dp=1)
    job.submit()
    wait_until(lambda: "up 0 1" in job.log(0) and job.has_pid(0))
    os.kill(job.pid(0, "runner_pid"), signal.SIGKILL)
    wait_until(lambda: "up 1 1" in job.log(0))
    (job.folder / "enough").touch()
    assert job.end() == 0, job.output
    assert [each["kind"] for each in job.records("failed")] == ["lost_runner"]


def affinity(pid: int) -> set[int]:
    return set(os.sched_getaffinity(pid))


def test_a_runner_of_a_step_is_started_again_by_another_one_of_its_node(job: Job, tmp_path: Path) -> None:
    """Slurm would not do it. The new one outlives a rank of the one that started it, and ends with the job."""
    job.start_step(2, 2, "in_place", sys.executable, str(PROGRAMS / "slot_steps.py"), str(tmp_path), dp=4)
    job.wait_for_step(0)
    processors = affinity(job.pid(3, "runner_pid"))
    os.kill(job.pid(3, "runner_pid"), signal.SIGKILL)
    assert [member["slot"] for member in job.wait_for("began", 2)["members"]] == [0, 1, 2, 3]
    job.wait_for_step(1)
    started = job.pid(3, "runner_pid")
    variables = dict(
        word.split("=", 1) for word in Path(f"/proc/{started}/environ").read_text().split("\0") if "=" in word
    )
    assert (variables["SLURM_PROCID"], variables["SLURM_LOCALID"], variables["SLURMD_NODENAME"]) == ("3", "1", "n1")
    assert (variables["CUDA_VISIBLE_DEVICES"], affinity(started)) == ("1", processors)
    assert affinity(started) != affinity(job.pid(2, "runner_pid")) or os.cpu_count() == 1

    os.kill(job.pid(2), signal.SIGKILL)
    job.wait_for("began", 3)
    job.wait_for_step(2)
    assert job.pid(3, "runner_pid") == started and start_ticks(started) is not None
    (tmp_path / "finish").touch()
    assert job.end() == 0, job.output
    failed = [(each["kind"], each["rank"], each["node"]) for each in job.records("failed")]
    assert failed == [("lost_runner", 3, "n1"), ("died", 2, "n1")]
    assert not job.records("left_out")
    wait_until(lambda: not job.processes())


@pytest.mark.long
def test_a_runner_that_stands_still_is_replaced_and_killed(job: Job, tmp_path: Path) -> None:
    job.start_step(2, 2, "in_place", sys.executable, str(PROGRAMS / "slot_steps.py"), str(tmp_path), dp=4)
    job.wait_for_step(0)
    runner, rank = job.pid(1, "runner_pid"), job.pid(1)
    os.kill(runner, signal.SIGSTOP)
    wait_until(lambda: len(job.records("began")) == 2)
    job.wait_for_step(1)
    assert start_ticks(rank) is None and start_ticks(runner) is None
    (tmp_path / "finish").touch()
    assert job.end() == 0, job.output
    assert [(each["kind"], each["rank"]) for each in job.records("failed")] == [("lost_runner", 1)]


def test_a_rank_that_leaves_with_0_in_the_middle_is_replaced(job: Job, tmp_path: Path) -> None:
    job.start_step(1, 2, "in_place", sys.executable, str(PROGRAMS / "slot_steps.py"), str(tmp_path), dp=2)
    job.wait_for_step(0)
    (tmp_path / ".leave").write_text("1")
    (tmp_path / ".leave").rename(tmp_path / "leave")
    job.wait_for("began", 2)
    job.wait_for_step(1)
    (tmp_path / "finish").touch()
    assert job.end() == 0, job.output
    assert [(each["kind"], each["rank"], each["code"]) for each in job.records("failed")] == [("left_early", 1, 0)]


def test_a_program_that_leaves_with_0_is_to_blame_for_those_that_lose_it(job: Job) -> None:
    job.write(
        TOGETHER + "if RANK == 2: sys.exit(0)\n"
        "time.sleep(1)\n"
        "if RANK == 1: print('RuntimeError: Connection closed by peer [10.0.0.2]:4711'); sys.exit(5)\n" + WAIT
    )
    job.submit()
    assert job.end() == 5, job.output
    failed = [(each["kind"], each["rank"]) for each in job.records("failed")]
    assert failed == [("left_early", 2), ("died", 1)]
    (gave_up,) = job.records("gave_up")
    assert (gave_up["rank"], gave_up["exit_code"]) == (2, 5)
    first = job.exit()["first_failure"]
    assert (job.exit()["reason"], first["rank"], first["node"]) == ("left_early", 2, os.uname().nodename)


def fence(job: Job, name: str, generation: int, rank: int) -> dict[str, Any]:
    """Ask for a rank to be killed, and return the answer."""
    attempt, key = AttemptDir(job.attempt), f"fence.{name}"
    put_request(
        attempt, Request(key, "fence", "a test", "it hangs", attempt=attempt.name, generation=generation, rank=rank)
    )
    wait_until(lambda: read_answer(attempt, key) is not None and not read_requests(attempt, OF_CONTROLLER))
    return dict(read_answer(attempt, key) or {})


def test_nodes_are_lost_and_ranks_fenced_until_the_job_is_finished(job: Job, tmp_path: Path) -> None:
    """Three nodes of two slots for four ranks: a spare node is used up, then the layout shrinks."""
    job.start_step(3, 2, "in_place", sys.executable, str(PROGRAMS / "slot_steps.py"), str(tmp_path), dp=4)
    job.wait_for_step(0)
    survivor = job.pid(3)

    answer = fence(job, "early", 7, 1)
    assert (answer["granted"], answer["who"]) == (False, "a test")
    assert has_parts(answer["refused"], "generation 7", "generation 0")

    for rank in (0, 1):
        os.killpg(job.pid(rank, "runner_pid"), signal.SIGKILL)
    assert [member["slot"] for member in job.wait_for("began", 2)["members"]] == [4, 5, 2, 3]
    job.wait_for_step(1)
    assert job.records("left_out")[0]["node"] == "n0"

    assert fence(job, "now", 1, 2)["granted"]
    assert [member["slot"] for member in job.wait_for("began", 3)["members"]] == [4, 5, 2, 3]
    job.wait_for_step(2)

    for rank in (0, 1):
        os.killpg(job.pid(rank, "runner_pid"), signal.SIGKILL)
    began = job.wait_for("began", 4)
    assert (began["topology"]["dp"], [member["slot"] for member in began["members"]]) == (2, [2, 3])
    job.wait_for_step(3)
    assert job.pid(1) == survivor, "rank 3 of before has never ended"

    (tmp_path / "finish").touch()
    assert job.end() == 0, job.output
    kinds = [(each["generation"], each["kind"]) for each in job.records("failed")]
    assert kinds == [(0, "lost_node"), (0, "lost_node"), (1, "hung"), (2, "lost_node"), (2, "lost_node")]
    assert [each["phase"] for each in job.records("phase")] == ["joined", "restored", "first_step"] * 4
    assert job.records("began")[-1]["world_size"] == 2
    wait_until(lambda: not job.processes())


def test_a_pause_of_everything_is_no_loss(paused: tuple[Job, list[int], float]) -> None:
    """It comes last: by then, most of the pause is over."""
    job, pids, since = paused
    time.sleep(max(0.0, since + PAUSE_S - time.monotonic()))
    require_no_loss(job, pids)
