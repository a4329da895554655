"""The agent of a slot, with real processes: it serves one rank after another as a controller says."""

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
def slot(tmp_path: Path) -> Iterator[ToyController]:
    controller = ToyController(tmp_path / "run" / "attempts" / "0001")
    controller.attempt.mkdir(parents=True)
    yield controller
    controller.close()


@pytest.fixture(scope="module", autouse=True)
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyController]:
    """A slot whose process is stopped while other tests run: it takes ten seconds until it is killed."""
    controller = ToyController(tmp_path_factory.mktemp("stopped") / "run" / "attempts" / "0001")
    controller.attempt.mkdir(parents=True)
    start_level_1(controller, SLEEP)
    controller.begin(0)
    wait_until(lambda: "up" in controller.log())
    controller.stopped_at = time.time()
    os.kill(controller.serving(0)["pid"], signal.SIGSTOP)
    yield controller
    controller.close()


def start_level_1(slot: ToyController, program: str, *options: str) -> None:
    slot.start_slot("--survive", "restart", *options, program=[sys.executable, "-c", program])
    slot.wait_for("ready", generation=None)


def start_level_2(slot: ToyController, *words: str) -> None:
    options = ("--survive", "in_place", "--standby")
    slot.start_slot(*options, program=[sys.executable, str(PROGRAMS / "slot_process.py"), *words])
    slot.wait_for("ready", generation=None)


def exit_code_of(slot: ToyController) -> int:
    assert slot.runner is not None
    return slot.runner.wait(180)


# ------------------------------------------------------------------------------------------- level 1: any program


def test_a_program_is_started_for_each_generation(slot: ToyController) -> None:
    start_level_1(slot, f"{SAY_PLACE}; {SLEEP}")
    hello, ready = slot.wait_for("hello"), slot.wait_for("ready")
    assert (hello["slot"], hello["local_rank"]) == (1, 1) and TOKEN not in str(hello)
    assert hello["node"] == hello["host"] == socket.gethostname()
    with socket.socket() as store:
        store.bind(("", ready["port"]))
    slot.begin(0, rank=1)
    wait_until(lambda: "up" in slot.log())
    first = slot.serving(0)
    assert first["generation"] == 0
    os.kill(first["pid"], signal.SIGKILL)
    ended = slot.wait_for("ended", generation=0)
    assert (ended["rank"], ended["code"], ended["signal"], ended["was_requested"]) == (1, None, "SIGKILL", False)
    assert abs(ended["time"] - time.time()) < 100
    assert slot.record("exits")["signal"] == "SIGKILL"
    again = slot.wait_for("ready", generation=0)
    assert again["port"] != ready["port"]
    slot.begin(1, rank=1)
    wait_until(lambda: slot.log().count("up") == 2)
    assert slot.serving(1)["pid"] != first["pid"] and slot.serving(1)["generation"] == 1
    assert not (slot.attempt / "exits" / "rank-0001.json").exists()
    places = [line for line in slot.log() if line.startswith("[")]
    assert places == [f"{['1', '1', '2', '0', '127.0.0.1', '12345', str(number), '0001']} False" for number in (0, 1)]


def test_a_slot_may_get_another_rank(slot: ToyController) -> None:
    start_level_1(slot, SLEEP)
    slot.begin(0, rank=1)
    wait_until(lambda: "up" in slot.log())
    slot.order("end", generation=0, why="rank 0 died", grace_s=5)
    ended = slot.wait_for("ended", generation=0)
    assert (ended["signal"], ended["was_requested"]) == ("SIGTERM", True) and "rank 0 died" in ended["words"]
    slot.wait_for("ready", generation=0)
    slot.begin(1, rank=0, world_size=1)
    wait_until(lambda: "up" in slot.log("rank-0000"))
    assert not (slot.attempt / "pids" / "rank-0001.json").exists()
    assert slot.serving(1, 0)["coordinate"] == {"pp": 0, "tp": 0, "dp": 0}
    slot.order("leave", code=3)
    assert exit_code_of(slot) == 3
    assert not is_alive(slot.serving(1, 0)["pid"])


def test_a_program_that_ignores_term_is_killed_with_all_that_it_has_started(slot: ToyController) -> None:
    start_level_1(slot, f"import signal; signal.signal(15, signal.SIG_IGN); {PARENT}")
    slot.begin(0)
    wait_until(lambda: "up" in slot.log())
    child = int(slot.log()[0])
    assert is_alive(child)
    began = time.monotonic()
    slot.order("end", generation=0, why="rank 0 died", grace_s=1)
    assert slot.wait_for("ended", generation=0)["signal"] == "SIGKILL"
    assert time.monotonic() - began >= 1
    assert not is_alive(child)
    slot.wait_for("ready", generation=0)


def test_what_a_dead_program_has_started_dies_too(slot: ToyController) -> None:
    start_level_1(slot, PARENT)
    slot.begin(0)
    wait_until(lambda: "up" in slot.log())
    os.kill(slot.serving(0)["pid"], signal.SIGKILL)
    slot.wait_for("ready", generation=0)
    assert not is_alive(int(slot.log()[0]))


def test_a_fence_kills_only_in_its_generation(slot: ToyController) -> None:
    start_level_1(slot, SLEEP)
    slot.begin(4)
    wait_until(lambda: "up" in slot.log())
    slot.order("kill", generation=3, why="an old verdict")
    slot.order("kill", generation=4, why="rank 1 hangs")
    ended = slot.wait_for("ended", generation=4)
    assert (ended["signal"], ended["was_requested"]) == ("SIGKILL", True) and "rank 1 hangs" in ended["words"]


def test_exit_codes_are_said_and_success_waits_for_the_others(slot: ToyController) -> None:
    start_level_1(slot, "import os; raise SystemExit(7 * (os.environ['BSL_GENERATION'] == '0'))")
    slot.begin(0)
    assert slot.wait_for("ended", generation=0)["code"] == 7
    slot.wait_for("ready", generation=0)
    slot.begin(1)
    ended = slot.wait_for("ended", generation=1)
    assert (ended["code"], ended["signal"], ended["was_requested"]) == (0, None, False)
    assert slot.record("exits")["code"] == 0
    slot.order("leave", code=0)
    assert exit_code_of(slot) == 0
    assert not [each for each in slot.said if each["say"] == "ready" and each["generation"] == 1]


def test_a_node_is_tried_after_a_rank_has_died_and_a_bad_one_is_not_ready_again(slot: ToyController) -> None:
    start_level_1(slot, "raise SystemExit(7)", "--check")
    slot.begin(0)
    slot.wait_for("ended", generation=0)
    slot.wait_for("ready", generation=0)
    assert not [each for each in slot.said if each["say"] == "unfit"]
    assert slot.runner is not None
    # From now on, no file can grow beyond 8 MiB on this "node".
    resource.prlimit(slot.runner.pid, resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
    slot.begin(1)
    slot.wait_for("ended", generation=1)
    assert has_parts(slot.wait_for("unfit")["words"], "64 MiB", "/dev/shm: File too large")
    assert not [each for each in slot.said if each["say"] == "ready" and each["generation"] == 1]


def test_a_program_that_cannot_be_started_is_said(slot: ToyController) -> None:
    slot.start_slot("--survive", "restart", program=["/no/such/program"])
    slot.wait_for("ready")
    slot.begin(0)
    ended = slot.wait_for("ended", generation=0)
    assert ended["code"] == 127 and "cannot start /no/such/program" in ended["words"]
    assert "No such file" in slot.record("exits")["error"]


@pytest.mark.parametrize("is_silent", [False, pytest.param(True, marks=pytest.mark.long)])
def test_nothing_outlives_the_controller(slot: ToyController, is_silent: bool) -> None:
    start_level_1(slot, PARENT)
    slot.begin(0)
    wait_until(lambda: "up" in slot.log())
    if is_silent:
        slot.fall_silent()
        wait_until(lambda: slot.runner is not None and slot.runner.poll() is not None)
    else:
        assert slot.runner is not None
        slot._connection.shutdown(socket.SHUT_RDWR)
    assert exit_code_of(slot) == 1
    assert any("controller" in line for line in slot.log())
    assert not is_alive(slot.serving(0)["pid"]) and not is_alive(int(slot.log()[0]))
    assert slot.record("exits")["signal"] == "SIGTERM"


def test_nothing_outlives_a_killed_runner(slot: ToyController) -> None:
    start_level_1(slot, DEAF)
    slot.begin(0)
    wait_until(lambda: "up" in slot.log())
    assert slot.runner is not None
    slot.runner.kill()
    wait_until(lambda: not is_alive(slot.serving(0)["pid"]))


@pytest.mark.parametrize("serves", [True, False])
def test_term_is_passed_on_and_ends_the_slot(slot: ToyController, serves: bool) -> None:
    start_level_1(
        slot, "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(9)); print('up'); time.sleep(60)"
    )
    if serves:
        slot.begin(0)
        wait_until(lambda: "up" in slot.log())
    assert slot.runner is not None
    slot.runner.terminate()
    assert exit_code_of(slot) == (9 if serves else 143)
    if serves:
        ended = slot.wait_for("ended", generation=0)
        assert (ended["code"], ended["was_requested"]) == (9, True)
        assert slot.record("exits")["terminated"] is not None


def test_slurm_numbers_a_slot_and_its_term_comes_before_that_of_the_controller(slot: ToyController) -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n3"}
    slot.start_slot("--survive", "restart", program=[sys.executable, "-c", SLEEP], **slurm)
    hello = slot.wait_for("hello")
    assert (hello["slot"], hello["local_rank"], hello["node"]) == (5, 1, "n3")
    slot.wait_for("ready")
    slot.begin(0)
    wait_until(lambda: "up" in slot.log())
    os.kill(slot.serving(0)["pid"], signal.SIGTERM)
    ended = slot.wait_for("ended")
    assert 1.9 < time.time() - ended["time"] < 10, "the controller may hear that the job ends, and not take it for more"
    assert slot.wait_for("ready", generation=0)


def test_a_wish_to_stop_holds_for_later_generations(slot: ToyController) -> None:
    stops = "import os, signal, sys, time; signal.signal(12, lambda *_: sys.exit(int(os.environ['BSL_GENERATION'])))"
    start_level_1(slot, f"import time; time.sleep(0.3); {stops}; print('up'); time.sleep(600)")
    slot.begin(3)
    wait_until(lambda: "up" in slot.log())
    assert slot.runner is not None
    slot.runner.send_signal(signal.SIGUSR2)
    assert slot.wait_for("ended", generation=3)["code"] == 3
    slot.begin(4)
    assert slot.wait_for("ended", generation=4)["code"] == 4
    assert slot.log().count("up") == 2


# ------------------------------------------------------------------------------------------- level 2: `bsl train`


def test_a_process_leaves_and_serves_again(slot: ToyController) -> None:
    start_level_2(slot)
    assert "starts []" in slot.log("slot-0001")
    slot.begin(0)
    stepped = slot.wait_for("rank", word="stepped", generation=0)
    assert (stepped["rank"], stepped["step"]) == (1, 0) and stepped["time"] > 0
    first = slot.serving(0)["pid"]
    slot.order("end", generation=0, why="rank 0 died", grace_s=10)
    assert slot.wait_for("rank", word="left")["step"] == 7
    slot.wait_for("ready", generation=0)
    assert not [each for each in slot.said if each["say"] == "ended"]
    slot.begin(1, rank=0)
    slot.wait_for("rank", word="stepped", generation=1, rank=0)
    assert slot.serving(1, 0)["pid"] == first and not (slot.attempt / "pids" / "rank-0001.json").exists()
    assert slot.log("rank-0000") == [f"begins 1 0 {first}"]
    assert slot.log() == [f"begins 0 1 {first}", "leaves 0"]


def test_a_standby_takes_over(slot: ToyController) -> None:
    start_level_2(slot)
    assert slot.log("slot-0001") == ["starts []"]
    slot.begin(0)
    slot.wait_for("rank", word="stepped", generation=0)
    slot.wait_for("rank", word="standby", generation=0)
    assert slot.log("slot-0001") == ["starts []", "starts []"]
    first = slot.serving(0)["pid"]
    os.kill(first, signal.SIGKILL)
    assert slot.wait_for("ended", generation=0)["signal"] == "SIGKILL"
    slot.wait_for("ready", generation=0)
    slot.begin(1)
    slot.wait_for("rank", word="stepped", generation=1)
    second = slot.serving(1)
    assert second["pid"] != first and f"process {second['pid']} takes over" in " ".join(slot.log("slot-0001"))
    wait_until(lambda: slot.log("slot-0001").count("starts []") == 3)
    slot.order("leave", code=0)
    assert exit_code_of(slot) == 0
    assert not is_alive(second["pid"])


def children(slot: ToyController) -> list[int]:
    assert slot.runner is not None
    pid = slot.runner.pid
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_others(slot: ToyController, known: set[int]) -> bool:
    """Whether the runner has children that are not known."""
    return bool(set(children(slot)) - known)


@pytest.mark.parametrize("is_killed_early", [False, pytest.param(True, marks=pytest.mark.long)])
def test_standbys_that_are_killed_cost_nothing_but_themselves(
    slot: ToyController, tmp_path: Path, is_killed_early: bool
) -> None:
    """Those that are killed before they are ready are tried three times. The slot serves on, and recovers without."""
    program = [sys.executable, str(PROGRAMS / "slot_steps.py"), str(tmp_path)]
    slot.start_slot("--survive", "in_place", "--standby", program=program)
    slot.wait_for("ready", generation=None)
    slot.begin(0)
    serving, killed = slot.serving(0)["pid"], set[int]()
    for _ in range(3):
        wait_until(partial(has_others, slot, {serving, *killed}))
        if not is_killed_early:
            slot.wait_for("rank", word="standby", generation=0)
            time.sleep(0.3)
        killed |= set(children(slot)) - {serving}
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not killed & set(children(slot)))
    assert slot.serving(0)["pid"] == serving and not [each for each in slot.said if each["say"] == "ended"]
    os.kill(serving, signal.SIGKILL)
    assert slot.wait_for("ended", generation=0)["rank"] == 1
    slot.wait_for("ready", generation=0)


def test_without_a_standby_the_slot_serves_on(slot: ToyController, tmp_path: Path) -> None:
    """None can be started any more. When the process that serves dies too, the slot has nothing to offer."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    program = [str(python), str(PROGRAMS / "slot_steps.py"), str(tmp_path)]
    slot.start_slot("--survive", "in_place", "--standby", program=program)
    slot.wait_for("ready", generation=None)
    python.unlink()
    slot.begin(0)
    wait_until(lambda: sum("no standby" in line for line in slot.log()) == 3)
    step = slot.said[-1]["step"]
    slot.wait_for("rank", word="stepped", step=step + 3)
    assert not [each for each in slot.said if each["say"] == "ended"]
    os.kill(slot.serving(0)["pid"], signal.SIGKILL)
    assert slot.wait_for("ended", generation=0)["signal"] == "SIGKILL"
    assert slot.wait_for("ended", code=127)["is_final"]
    assert exit_code_of(slot) == 127


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.long)])
def test_a_rank_that_has_finished_has_not_failed_however_its_process_ends(
    slot: ToyController, tmp_path: Path, number: int
) -> None:
    (tmp_path / "finish").write_text("wait")
    program = [sys.executable, str(PROGRAMS / "slot_steps.py"), str(tmp_path)]
    slot.start_slot("--survive", "in_place", program=program)
    slot.wait_for("ready", generation=None)
    slot.begin(0)
    slot.wait_for("rank", word="finished")
    os.kill(slot.serving(0)["pid"], number)
    ended = slot.wait_for("ended", generation=0)
    assert (ended["code"], ended["signal"], ended["was_requested"]) == (0, None, False)
    record = slot.record("exits")
    assert (record["signal"], record["clean_end"]) == (signal.Signals(number).name, True)
    assert has_parts(slot.log()[-1], "finished", signal.Signals(number).name)
    assert children(slot) == []
    slot.order("leave", code=0)
    assert exit_code_of(slot) == 0


def test_a_process_that_is_killed_while_it_may_still_leave_has_died(slot: ToyController) -> None:
    start_level_2(slot, "deaf")
    slot.begin(0)
    slot.wait_for("rank", word="stepped", generation=0)
    slot.order("end", generation=0, why="rank 0 died", grace_s=60)
    os.kill(slot.serving(0)["pid"], signal.SIGKILL)
    ended = slot.wait_for("ended", generation=0)
    assert (ended["signal"], ended["was_requested"], ended["words"]) == ("SIGKILL", False, None)
    slot.wait_for("ready", generation=0)


def test_a_process_that_does_not_leave_is_killed(slot: ToyController) -> None:
    start_level_2(slot, "deaf")
    slot.begin(0)
    slot.wait_for("rank", word="stepped", generation=0)
    slot.order("end", generation=0, why="rank 0 died", grace_s=1)
    ended = slot.wait_for("ended", generation=0)
    assert (ended["signal"], ended["was_requested"]) == ("SIGKILL", True)
    assert has_parts(ended["words"], "generation 0", "1 s")
    slot.wait_for("ready", generation=0)


def test_a_process_that_makes_progress_with_leaving_has_more_time(slot: ToyController) -> None:
    start_level_2(slot, "slow", "2")
    slot.begin(0)
    slot.wait_for("rank", word="stepped", generation=0)
    slot.order("end", generation=0, why="rank 0 died", grace_s=3)
    assert slot.wait_for("rank", word="left")["step"] == 7
    slot.wait_for("ready", generation=0)
    assert not [each for each in slot.said if each["say"] == "ended"]


def test_an_error_that_would_come_again_is_said(slot: ToyController) -> None:
    start_level_2(slot, "exit", "5")
    slot.begin(0)
    ended = slot.wait_for("ended", generation=0)
    assert (ended["code"], ended["is_final"]) == (5, True)
    assert slot.wait_for("rank", word="final")["text"] == "no use"


def test_processes_that_never_get_ready_end_the_slot(slot: ToyController) -> None:
    slot.start_slot("--survive", "in_place", program=[sys.executable, "-c", "import no_such_module"])
    ended = slot.wait_for("ended", generation=None)
    assert (ended["code"], ended["is_final"]) == (1, True) and "3 processes" in ended["words"]
    assert exit_code_of(slot) == 1
    assert " ".join(slot.log("slot-0001")).count("ModuleNotFoundError") == 3


def test_processes_that_wait_end_with_their_controller(slot: ToyController) -> None:
    start_level_2(slot)
    slot.begin(0)
    slot.wait_for("rank", word="stepped")
    first = slot.serving(0)["pid"]
    assert slot._connection is not None
    slot._connection.shutdown(socket.SHUT_RDWR)
    assert exit_code_of(slot) == 1
    assert not is_alive(first)


def test_at_level_2_a_stopped_process_is_killed_after_a_second(slot: ToyController) -> None:
    start_level_2(slot)
    slot.begin(0)
    slot.wait_for("rank", word="stepped")
    os.kill(slot.serving(0)["pid"], signal.SIGSTOP)
    ended = slot.wait_for("ended", generation=0)
    assert (ended["signal"], ended["was_requested"]) == ("SIGKILL", False)
    assert has_parts(ended["words"], "SIGSTOP", "for 1 s")


def test_a_stopped_process_is_killed(stopped: ToyController) -> None:
    ended = stopped.wait_for("ended", generation=0)
    assert 9 < ended["time"] - stopped.stopped_at < 30
    assert (ended["signal"], ended["was_requested"]) == ("SIGKILL", False) and has_parts(
        ended["words"], "SIGSTOP", "10 s"
    )
