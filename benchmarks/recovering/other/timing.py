"""Attacks at the worst moment: in a recovery, at an end, and requests that cross each other."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from recovering.attack import Attack, Expected
from recovering.attacked_run import StartedRun
from recovering.injured_run import BSL
from recovering.other.outside import until_quiet

EQUAL = Expected(equal=True)


def until_phase(run: StartedRun, generation: int, phase: str) -> None:
    while not any((each["generation"], each.get("phase")) == (generation, phase) for each in run.generations()):
        if not run.is_running:
            raise SystemError(f"waited for {phase} of generation {generation}, and the run has ended")
        time.sleep(0.002)


def _standby(run: StartedRun) -> None:
    until_quiet(run)
    mark = b"BSL_SLOT=1"
    mine = [pid for pid in run.standby_pids if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    run.kill(run.rank_pid(1))
    time.sleep(0.03)
    for pid in mine:
        run.kill(pid)
    run.claim("there was a standby", len(mine) == 1)


def _at_phase(phase: str, first: int, second: int, number: int = signal.SIGKILL) -> Callable[[StartedRun], None]:
    def injure(run: StartedRun) -> None:
        until_quiet(run)
        other = run.rank_pid(second)
        run.kill(run.rank_pid(first))
        until_phase(run, 1, phase)
        run.kill(other, number)

    return injure


def _with_stopped_buddy(run: StartedRun) -> None:
    until_quiet(run)
    pids = [run.rank_pid(0), run.rank_pid(1)]
    run.kill(pids[0], signal.SIGSTOP)
    run.kill(pids[1])


def _again_and_again(run: StartedRun) -> None:
    until_quiet(run)
    run.kill(run.rank_pid(1))
    for generation in (1, 2, 3):
        try:
            until_phase(run, generation, "joined")
        except SystemError:
            break
        run.kill(run.rank_pid(1))
    run.wait()
    run.claim("SIGKILL is the code", run.exit_code == 137)
    run.claim("only rank 1 is blamed", {rank for _, rank in run.failures()} == {1})
    run.note(f"{len(run.failures())} generations ended")


def _all(*ranks: int) -> Callable[[StartedRun], None]:
    def injure(run: StartedRun) -> None:
        until_quiet(run)
        for pid in [run.rank_pid(rank) for rank in ranks]:
            run.kill(pid)

    return injure


def _stop_twice(run: StartedRun) -> None:
    until_quiet(run)
    controller = run.controller_pid
    run.kill(controller, signal.SIGUSR2)
    time.sleep(0.1)
    run.kill(controller, signal.SIGUSR2)
    _then_again(run)


def _term_then_stop(run: StartedRun) -> None:
    until_quiet(run)
    controller = run.controller_pid
    run.kill(controller, signal.SIGTERM)
    time.sleep(0.1)
    run.kill(controller, signal.SIGUSR2)
    _then_again(run)


def _cancel_twice(run: StartedRun) -> None:
    until_quiet(run)
    run.kill(run.rank_pid(1))
    run.until_noticed()
    asked = [subprocess.Popen([*BSL_CANCEL, run.run.path], stdout=subprocess.DEVNULL) for _ in range(2)]
    for each in asked:
        each.wait(60)
    _then_again(run)


BSL_CANCEL = (sys.executable, "-c", BSL, "cancel")


def _then_again(run: StartedRun) -> None:
    """Claim that the attempt was stopped, leaves nothing behind, and says where it saved; then submit it again."""
    run.wait()
    reason, step = run.status()["exit"]["reason"], run.step()
    run.note(f"first attempt: {reason} after step {step}")
    run.claim("it was stopped or cancelled", reason in ("stopped", "cancelled", "signal", "asked"))
    time.sleep(1)
    run.claim("no rank is left", not run.trainer_pids)
    run.start()


def _save_and_kill(run: StartedRun) -> None:
    until_quiet(run)
    command = [sys.executable, "-c", BSL, "control", run.run.path, "save", "--why", "attack"]
    asking = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    time.sleep(0.8)
    run.kill(run.rank_pid(0))
    asking.wait(60)
    run.wait()
    extra = {path.name for path in run.run.checkpoints.glob("global_step*") if not path.name.endswith("0")}
    run.note(f"saved: {', '.join(sorted(extra)) or 'nothing'}")
    run.claim("the save that was asked for was done", bool(extra))


ATTACKS = (
    Attack("standby-too", "recovery", "rank 1 is killed, and 30 ms later its standby", _standby, EQUAL),
    Attack("at-joined", "recovery", "rank 1 is killed; rank 3 as generation 1 has joined",
           _at_phase("joined", 1, 3), EQUAL),
    Attack("sender", "recovery", "rank 1 is killed; its buddy, which sends its state, as generation 1 has joined",
           _at_phase("joined", 1, 0), EQUAL),
    Attack("at-restored", "recovery", "rank 2 is killed; rank 3, its buddy, as generation 1 has restored",
           _at_phase("restored", 2, 3), EQUAL),
    Attack("stopped-sender", "recovery", "rank 1 is killed; SIGSTOP to rank 0 as generation 1 has joined",
           _at_phase("joined", 1, 0, signal.SIGSTOP), EQUAL),
    Attack("stopped-buddy", "recovery", "SIGSTOP to rank 0, and rank 1, its buddy, is killed",
           _with_stopped_buddy, EQUAL),
    Attack("again-and-again", "recovery", "rank 1 is killed in each generation before it steps", _again_and_again,
           Expected(rank=1)),
    Attack("all-of-dp0", "recovery", "all of replica 0 are killed at once", _all(0, 2),
           Expected(equal=True, recovered=("buddies",))),
    Attack("last-stage", "recovery", "the last stage is killed with all of its buddies", _all(2, 3),
           Expected(equal=True, recovered=("checkpoint",))),
    Attack("stop-twice", "ends", "USR2 twice; submitted again", _stop_twice, EQUAL),
    Attack("term-then-stop", "ends", "TERM, then USR2; submitted again", _term_then_stop, EQUAL),
    Attack("cancel-twice", "ends", "cancelled twice in a recovery; submitted again", _cancel_twice, EQUAL),
    Attack("save-and-kill", "ends", "`bsl control save`, and rank 0 is killed", _save_and_kill, EQUAL),
)  # fmt: skip
