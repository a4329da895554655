"""The agent of a seat, with real processes: it serves one rank after another as a controller says."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.texts import has_parts
from tests.support.waiting import wait_until

from .toy_controller import TOKEN, ToyController, is_alive

PROGRAMS = Path(__file__).parent / "programs"
NAMES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "BSL_GENERATION", "BSL_ATTEMPT"]
SAY_PLACE = f"import os; print([os.environ[name] for name in {NAMES}], 'BSL_CONTROLLER_TOKEN' in os.environ)"
SLEEP = "import time; print('up'); time.sleep(600)"
DEAF = f"import signal; signal.signal(15, signal.SIG_IGN); {SLEEP}"
# Its child is in a session of its own, as the workers of torchrun are.
PARENT = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid); " + SLEEP


@pytest.fixture
def seat(tmp_path: Path) -> Iterator[ToyController]:
    controller = ToyController(tmp_path / "run" / "attempts" / "0001")
    controller.attempt.mkdir(parents=True)
    yield controller
    controller.close()


@pytest.fixture(scope="module", autouse=True)
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyController]:
    """A seat whose process is stopped while other tests run: it takes ten seconds until it is killed."""
    controller = ToyController(tmp_path_factory.mktemp("stopped") / "run" / "attempts" / "0001")
    controller.attempt.mkdir(parents=True)
    start_level_1(controller, SLEEP)
    controller.begin(0)
    wait_until(lambda: "up" in controller.log())
    controller.stopped_at = time.time()
    os.kill(controller.serving(0)["pid"], signal.SIGSTOP)
    yield controller
    controller.close()


def start_level_1(seat: ToyController, program: str, *options: str) -> None:
    seat.start_seat("--survive", "restart", *options, program=[sys.executable, "-c", program])
    seat.wait_for("ready", generation=None)


def start_level_2(seat: ToyController, *words: str) -> None:
    options = ("--survive", "in_place", "--standby")
    seat.start_seat(*options, program=[sys.executable, str(PROGRAMS / "seat_process.py"), *words])
    seat.wait_for("ready", generation=None)


def exit_code_of(seat: ToyController) -> int:
    assert seat.runner is not None
    return seat.runner.wait(20)


# ------------------------------------------------------------------------------------------- level 1: any program


def test_a_program_is_started_for_each_generation(seat: ToyController) -> None:
    start_level_1(seat, f"{SAY_PLACE}; {SLEEP}")
    hello, ready = seat.wait_for("hello"), seat.wait_for("ready")
    assert (hello["seat"], hello["local_rank"]) == (1, 1) and TOKEN not in str(hello)
    assert hello["node"] == hello["host"] == socket.gethostname()
    with socket.socket() as store:
        store.bind(("", ready["port"]))
    seat.begin(0, rank=1)
    wait_until(lambda: "up" in seat.log())
    first = seat.serving(0)
    assert first["generation"] == 0
    os.kill(first["pid"], signal.SIGKILL)
    ended = seat.wait_for("ended", generation=0)
    assert (ended["rank"], ended["code"], ended["signal"], ended["was_told"]) == (1, None, "SIGKILL", False)
    assert abs(ended["time"] - time.time()) < 5
    assert seat.record("exits")["signal"] == "SIGKILL"
    again = seat.wait_for("ready", generation=0)
    assert again["port"] != ready["port"]
    seat.begin(1, rank=1)
    wait_until(lambda: seat.log().count("up") == 2)
    assert seat.serving(1)["pid"] != first["pid"] and seat.serving(1)["generation"] == 1
    assert not (seat.attempt / "exits" / "rank-0001.json").exists()
    places = [line for line in seat.log() if line.startswith("[")]
    assert places == [f"{['1', '1', '2', '0', '127.0.0.1', '12345', str(number), '0001']} False" for number in (0, 1)]


def test_a_seat_may_get_another_rank(seat: ToyController) -> None:
    start_level_1(seat, SLEEP)
    seat.begin(0, rank=1)
    wait_until(lambda: "up" in seat.log())
    seat.order("end", generation=0, why="rank 0 died", grace_s=5)
    ended = seat.wait_for("ended", generation=0)
    assert (ended["signal"], ended["was_told"]) == ("SIGTERM", True) and "rank 0 died" in ended["words"]
    seat.wait_for("ready", generation=0)
    seat.begin(1, rank=0, world_size=1)
    wait_until(lambda: "up" in seat.log("rank-0000"))
    assert not (seat.attempt / "pids" / "rank-0001.json").exists()
    assert seat.serving(1, 0)["coordinate"] == {"pp": 0, "tp": 0, "dp": 0}
    seat.order("leave", code=3)
    assert exit_code_of(seat) == 3
    assert not is_alive(seat.serving(1, 0)["pid"])


def test_a_program_that_ignores_term_is_killed_with_all_that_it_has_started(seat: ToyController) -> None:
    start_level_1(seat, f"import signal; signal.signal(15, signal.SIG_IGN); {PARENT}")
    seat.begin(0)
    wait_until(lambda: "up" in seat.log())
    child = int(seat.log()[0])
    assert is_alive(child)
    began = time.monotonic()
    seat.order("end", generation=0, why="rank 0 died", grace_s=1)
    assert seat.wait_for("ended", generation=0)["signal"] == "SIGKILL"
    assert 1 <= time.monotonic() - began < 10
    assert not is_alive(child)
    seat.wait_for("ready", generation=0)


def test_what_a_dead_program_has_started_dies_too(seat: ToyController) -> None:
    start_level_1(seat, PARENT)
    seat.begin(0)
    wait_until(lambda: "up" in seat.log())
    os.kill(seat.serving(0)["pid"], signal.SIGKILL)
    seat.wait_for("ready", generation=0)
    assert not is_alive(int(seat.log()[0]))


def test_a_fence_kills_only_in_its_generation(seat: ToyController) -> None:
    start_level_1(seat, SLEEP)
    seat.begin(4)
    wait_until(lambda: "up" in seat.log())
    seat.order("kill", generation=3, why="an old verdict")
    seat.order("kill", generation=4, why="rank 1 hangs")
    ended = seat.wait_for("ended", generation=4)
    assert (ended["signal"], ended["was_told"]) == ("SIGKILL", True) and "rank 1 hangs" in ended["words"]


def test_exit_codes_are_said_and_success_waits_for_the_others(seat: ToyController) -> None:
    start_level_1(seat, "import os; raise SystemExit(7 * (os.environ['BSL_GENERATION'] == '0'))")
    seat.begin(0)
    assert seat.wait_for("ended", generation=0)["code"] == 7
    seat.wait_for("ready", generation=0)
    seat.begin(1)
    ended = seat.wait_for("ended", generation=1)
    assert (ended["code"], ended["signal"], ended["was_told"]) == (0, None, False)
    assert seat.record("exits")["code"] == 0
    seat.order("leave", code=0)
    assert exit_code_of(seat) == 0
    assert not [each for each in seat.said if each["say"] == "ready" and each["generation"] == 1]


def test_a_node_is_tried_after_a_rank_has_died_and_a_bad_one_is_not_ready_again(seat: ToyController) -> None:
    start_level_1(seat, "raise SystemExit(7)", "--check")
    seat.begin(0)
    seat.wait_for("ended", generation=0)
    seat.wait_for("ready", generation=0, timeout_s=40)
    assert not [each for each in seat.said if each["say"] == "unfit"]
    assert seat.runner is not None
    # From now on, no file can grow beyond 8 MiB on this "node".
    resource.prlimit(seat.runner.pid, resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
    seat.begin(1)
    seat.wait_for("ended", generation=1)
    assert has_parts(seat.wait_for("unfit", timeout_s=40)["words"], "64 MiB", "/dev/shm: File too large")
    assert not [each for each in seat.said if each["say"] == "ready" and each["generation"] == 1]


def test_a_program_that_cannot_be_started_is_said(seat: ToyController) -> None:
    seat.start_seat("--survive", "restart", program=["/no/such/program"])
    seat.wait_for("ready")
    seat.begin(0)
    ended = seat.wait_for("ended", generation=0)
    assert ended["code"] == 127 and "cannot start /no/such/program" in ended["words"]
    assert "No such file" in seat.record("exits")["error"]


@pytest.mark.parametrize("is_silent", [False, pytest.param(True, marks=pytest.mark.long)])
def test_nothing_outlives_the_controller(seat: ToyController, is_silent: bool) -> None:
    start_level_1(seat, PARENT)
    seat.begin(0)
    wait_until(lambda: "up" in seat.log())
    if is_silent:
        seat.fall_silent()
        wait_until(lambda: seat.runner is not None and seat.runner.poll() is not None, 90)
    else:
        assert seat.runner is not None
        seat._connection.shutdown(socket.SHUT_RDWR)
    assert exit_code_of(seat) == 1
    assert any("controller" in line for line in seat.log())
    assert not is_alive(seat.serving(0)["pid"]) and not is_alive(int(seat.log()[0]))
    assert seat.record("exits")["signal"] == "SIGTERM"


def test_nothing_outlives_a_killed_runner(seat: ToyController) -> None:
    start_level_1(seat, DEAF)
    seat.begin(0)
    wait_until(lambda: "up" in seat.log())
    assert seat.runner is not None
    seat.runner.kill()
    wait_until(lambda: not is_alive(seat.serving(0)["pid"]))


@pytest.mark.parametrize("serves", [True, False])
def test_term_is_passed_on_and_ends_the_seat(seat: ToyController, serves: bool) -> None:
    start_level_1(
        seat, "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(9)); print('up'); time.sleep(60)"
    )
    if serves:
        seat.begin(0)
        wait_until(lambda: "up" in seat.log())
    assert seat.runner is not None
    seat.runner.terminate()
    assert exit_code_of(seat) == (9 if serves else 143)
    if serves:
        ended = seat.wait_for("ended", generation=0)
        assert (ended["code"], ended["was_told"]) == (9, True)
        assert seat.record("exits")["terminated"] is not None


def test_slurm_numbers_a_seat_and_its_term_comes_before_that_of_the_controller(seat: ToyController) -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n3"}
    seat.start_seat("--survive", "restart", program=[sys.executable, "-c", SLEEP], **slurm)
    hello = seat.wait_for("hello")
    assert (hello["seat"], hello["local_rank"], hello["node"]) == (5, 1, "n3")
    seat.wait_for("ready")
    seat.begin(0)
    wait_until(lambda: "up" in seat.log())
    os.kill(seat.serving(0)["pid"], signal.SIGTERM)
    ended = seat.wait_for("ended")
    assert 1.9 < time.time() - ended["time"] < 10, "the controller may hear that the job ends, and not take it for more"
    assert seat.wait_for("ready", generation=0)


def test_a_wish_to_stop_holds_for_later_generations(seat: ToyController) -> None:
    stops = "import os, signal, sys, time; signal.signal(12, lambda *_: sys.exit(int(os.environ['BSL_GENERATION'])))"
    start_level_1(seat, f"import time; time.sleep(0.3); {stops}; print('up'); time.sleep(600)")
    seat.begin(3)
    wait_until(lambda: "up" in seat.log())
    assert seat.runner is not None
    seat.runner.send_signal(signal.SIGUSR2)
    assert seat.wait_for("ended", generation=3)["code"] == 3
    seat.begin(4)
    assert seat.wait_for("ended", generation=4)["code"] == 4
    assert seat.log().count("up") == 2


# ------------------------------------------------------------------------------------------- level 2: `bsl train`


def test_a_process_leaves_and_serves_again(seat: ToyController) -> None:
    start_level_2(seat)
    assert "starts []" in seat.log("seat-0001")
    seat.begin(0)
    stepped = seat.wait_for("rank", word="stepped", generation=0)
    assert (stepped["rank"], stepped["step"]) == (1, 0) and stepped["time"] > 0
    first = seat.serving(0)["pid"]
    seat.order("end", generation=0, why="rank 0 died", grace_s=10)
    assert seat.wait_for("rank", word="left")["step"] == 7
    seat.wait_for("ready", generation=0)
    assert not [each for each in seat.said if each["say"] == "ended"]
    seat.begin(1, rank=0)
    seat.wait_for("rank", word="stepped", generation=1, rank=0)
    assert seat.serving(1, 0)["pid"] == first and not (seat.attempt / "pids" / "rank-0001.json").exists()
    assert seat.log("rank-0000") == [f"begins 1 0 {first}"]
    assert seat.log() == [f"begins 0 1 {first}", "leaves 0"]


def test_a_standby_takes_over(seat: ToyController) -> None:
    start_level_2(seat)
    assert seat.log("seat-0001") == ["starts []"]
    seat.begin(0)
    seat.wait_for("rank", word="stepped", generation=0)
    seat.wait_for("rank", word="standby", generation=0)
    assert seat.log("seat-0001") == ["starts []", "starts []"]
    first = seat.serving(0)["pid"]
    killed = time.monotonic()
    os.kill(first, signal.SIGKILL)
    assert seat.wait_for("ended", generation=0)["signal"] == "SIGKILL"
    seat.wait_for("ready", generation=0)
    assert time.monotonic() - killed < 5
    seat.begin(1)
    seat.wait_for("rank", word="stepped", generation=1)
    second = seat.serving(1)
    assert second["pid"] != first and f"process {second['pid']} takes over" in " ".join(seat.log("seat-0001"))
    wait_until(lambda: seat.log("seat-0001").count("starts []") == 3)
    seat.order("leave", code=0)
    assert exit_code_of(seat) == 0
    assert not is_alive(second["pid"])


def children(seat: ToyController) -> list[int]:
    assert seat.runner is not None
    pid = seat.runner.pid
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_others(seat: ToyController, known: set[int]) -> bool:
    """Whether the runner has children that are not known."""
    return bool(set(children(seat)) - known)


@pytest.mark.parametrize("is_killed_early", [False, pytest.param(True, marks=pytest.mark.long)])
def test_standbys_that_are_killed_cost_nothing_but_themselves(
    seat: ToyController, tmp_path: Path, is_killed_early: bool
) -> None:
    """Those that are killed before they are ready are tried three times. The seat serves on, and recovers without."""
    program = [sys.executable, str(PROGRAMS / "seat_steps.py"), str(tmp_path)]
    seat.start_seat("--survive", "in_place", "--standby", program=program)
    seat.wait_for("ready", generation=None)
    seat.begin(0)
    serving, killed = seat.serving(0)["pid"], set[int]()
    for _ in range(3):
        wait_until(partial(has_others, seat, {serving, *killed}))
        if not is_killed_early:
            seat.wait_for("rank", word="standby", generation=0)
            time.sleep(0.3)
        killed |= set(children(seat)) - {serving}
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not killed & set(children(seat)))
    assert seat.serving(0)["pid"] == serving and not [each for each in seat.said if each["say"] == "ended"]
    os.kill(serving, signal.SIGKILL)
    assert seat.wait_for("ended", generation=0)["rank"] == 1
    seat.wait_for("ready", generation=0)


def test_without_a_standby_the_seat_serves_on(seat: ToyController, tmp_path: Path) -> None:
    """None can be started any more. When the process that serves dies too, the seat has nothing to offer."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    program = [str(python), str(PROGRAMS / "seat_steps.py"), str(tmp_path)]
    seat.start_seat("--survive", "in_place", "--standby", program=program)
    seat.wait_for("ready", generation=None)
    python.unlink()
    seat.begin(0)
    wait_until(lambda: sum("no standby" in line for line in seat.log()) == 3)
    step = seat.said[-1]["step"]
    seat.wait_for("rank", word="stepped", step=step + 3)
    assert not [each for each in seat.said if each["say"] == "ended"]
    os.kill(seat.serving(0)["pid"], signal.SIGKILL)
    assert seat.wait_for("ended", generation=0)["signal"] == "SIGKILL"
    assert seat.wait_for("ended", code=127)["is_final"]
    assert exit_code_of(seat) == 127


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.long)])
def test_a_rank_that_has_finished_has_not_failed_however_its_process_ends(
    seat: ToyController, tmp_path: Path, number: int
) -> None:
    (tmp_path / "finish").write_text("wait")
    program = [sys.executable, str(PROGRAMS / "seat_steps.py"), str(tmp_path)]
    seat.start_seat("--survive", "in_place", program=program)
    seat.wait_for("ready", generation=None)
    seat.begin(0)
    seat.wait_for("rank", word="finished")
    os.kill(seat.serving(0)["pid"], number)
    ended = seat.wait_for("ended", generation=0)
    assert (ended["code"], ended["signal"], ended["was_told"]) == (0, None, False)
    record = seat.record("exits")
    assert (record["signal"], record["clean_end"]) == (signal.Signals(number).name, True)
    assert has_parts(seat.log()[-1], "finished", signal.Signals(number).name)
    assert children(seat) == []
    seat.order("leave", code=0)
    assert exit_code_of(seat) == 0


def test_a_process_that_is_killed_while_it_may_still_leave_has_died(seat: ToyController) -> None:
    start_level_2(seat, "deaf")
    seat.begin(0)
    seat.wait_for("rank", word="stepped", generation=0)
    seat.order("end", generation=0, why="rank 0 died", grace_s=60)
    os.kill(seat.serving(0)["pid"], signal.SIGKILL)
    ended = seat.wait_for("ended", generation=0)
    assert (ended["signal"], ended["was_told"], ended["words"]) == ("SIGKILL", False, None)
    seat.wait_for("ready", generation=0)


def test_a_process_that_does_not_leave_is_killed(seat: ToyController) -> None:
    start_level_2(seat, "deaf")
    seat.begin(0)
    seat.wait_for("rank", word="stepped", generation=0)
    seat.order("end", generation=0, why="rank 0 died", grace_s=1)
    ended = seat.wait_for("ended", generation=0)
    assert (ended["signal"], ended["was_told"]) == ("SIGKILL", True)
    assert has_parts(ended["words"], "generation 0", "1 s")
    seat.wait_for("ready", generation=0)


def test_an_error_that_would_come_again_is_said(seat: ToyController) -> None:
    start_level_2(seat, "exit", "5")
    seat.begin(0)
    ended = seat.wait_for("ended", generation=0)
    assert (ended["code"], ended["is_final"]) == (5, True)
    assert seat.wait_for("rank", word="final")["text"] == "no use"


def test_processes_that_never_get_ready_end_the_seat(seat: ToyController) -> None:
    seat.start_seat("--survive", "in_place", program=[sys.executable, "-c", "import no_such_module"])
    ended = seat.wait_for("ended", generation=None)
    assert (ended["code"], ended["is_final"]) == (1, True) and "3 processes" in ended["words"]
    assert exit_code_of(seat) == 1
    assert " ".join(seat.log("seat-0001")).count("ModuleNotFoundError") == 3


def test_processes_that_wait_end_with_their_controller(seat: ToyController) -> None:
    start_level_2(seat)
    seat.begin(0)
    seat.wait_for("rank", word="stepped")
    first = seat.serving(0)["pid"]
    assert seat._connection is not None
    seat._connection.shutdown(socket.SHUT_RDWR)
    assert exit_code_of(seat) == 1
    assert not is_alive(first)


def test_a_stopped_process_is_killed(stopped: ToyController) -> None:
    ended = stopped.wait_for("ended", generation=0)
    assert 9 < ended["time"] - stopped.stopped_at < 30
    assert (ended["signal"], ended["was_told"]) == ("SIGKILL", False) and has_parts(ended["words"], "SIGSTOP", "10 s")
