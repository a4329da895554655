"""Signals to processes of a run: to ranks, runners, standbys and the controller."""

from __future__ import annotations

import random
import signal
import time

from recovering.attack import ATTACK_STEPS, Attack, Expected
from recovering.attacked_run import StartedRun

EQUAL = Expected(equal=True)
UNHURT = Expected(equal=True, recovered=())
LONGEST_ORPHAN_S = 20.0
"""Ranks whose controller is gone end within this time."""


def _controller(run: StartedRun) -> None:
    run.until(13)
    run.kill(run.controller_pid)
    run.wait()
    until = time.monotonic() + LONGEST_ORPHAN_S
    while run.processes() and time.monotonic() < until:
        time.sleep(0.2)
    run.claim(f"all ranks are gone after {LONGEST_ORPHAN_S:g} s", not run.processes())
    run.claim("status names the next command", "next:" in run.bsl("status", run.run.path).stdout)
    run.note(f"its state was {(run.status().get('job') or {}).get('state')}")
    run.start()


def _runner(run: StartedRun) -> None:
    run.until(13)
    run.kill(run.runner_pid(2))
    run.wait()
    run.claim("rank 2 is named, and no node", run.failures()[:1] == [("lost_runner", 2)])


def _buddies(run: StartedRun) -> None:
    run.until(16)
    first, second = run.rank_pid(0), run.rank_pid(1)
    run.kill(first)
    run.kill(second)


def _all_ranks(run: StartedRun) -> None:
    run.until(16)
    for pid in [run.rank_pid(rank) for rank in range(4)]:
        run.kill(pid)


def _short_stop(run: StartedRun) -> None:
    run.until(13)
    pid = run.rank_pid(1)
    run.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    run.kill(pid, signal.SIGCONT)


def _stop(run: StartedRun) -> None:
    run.until(13)
    run.kill(run.rank_pid(1), signal.SIGSTOP)
    run.wait()
    run.claim("rank 1 is named", [rank for _, rank in run.failures()][:1] == [1])


def _standbys(run: StartedRun) -> None:
    run.until_standbys()
    standbys = run.standby_pids
    run.note(f"{len(standbys)} standbys")
    run.claim("there were four", len(standbys) == 4)
    for pid in standbys:
        run.kill(pid)
    time.sleep(1)
    run.kill(run.rank_pid(3))


def _again_and_again(run: StartedRun) -> None:
    run.until(10)
    draw = random.Random(1)
    for _ in range(9):
        run.kill(run.rank_pid(draw.randrange(4)))
        time.sleep(3)
        if not run.is_running:
            break
    run.wait()
    run.note(f"{len(run.failures())} failures")


def _last_step(run: StartedRun) -> None:
    run.until(ATTACK_STEPS - 1)
    run.kill(run.rank_pid(1))


def _final_save(run: StartedRun) -> None:
    run.until(ATTACK_STEPS)
    run.kill(run.rank_pid(0))
    run.wait()
    told = run.bsl("status", run.run.path).stdout
    run.claim("status knows that it has finished", "has not finished a step" not in told)
    run.claim("status knows how many samples were lost", "samples lost: unknown" not in told)


def _exit_0(run: StartedRun) -> None:
    run.until(14)
    run.inject(2, "import os; os._exit(0)")
    run.wait()
    run.claim("rank 2 is named", [rank for _, rank in run.failures()][:1] == [2])


def _cancel(run: StartedRun) -> None:
    run.until(13)
    run.kill(run.rank_pid(1))
    run.until_noticed()
    done = run.bsl("cancel", run.run.path)
    run.claim(f"bsl cancel works ({done.stderr[-100:]})", done.returncode == 0)
    run.wait()
    run.claim(f"the reason is cancelled, not {run.reason()}", run.reason() == "cancelled")
    run.start()


def _time_limit(run: StartedRun) -> None:
    run.until(13)
    controller = run.controller_pid
    run.kill(run.rank_pid(1))
    run.until_noticed()
    run.kill(controller, signal.SIGUSR2)
    run.wait()
    run.claim(f"the reason is stopped, not {run.reason()}", run.reason() == "stopped")
    run.claim("status names the next command", "next:" in run.bsl("status", run.run.path).stdout)
    run.start()


def _save(run: StartedRun) -> None:
    run.until(13)
    run.kill(run.rank_pid(1))
    run.until_noticed()
    run.bsl("control", run.run.path, "save", "--why", "in the middle")
    run.wait()
    saved = sorted(int(each.name[11:]) for each in run.run.checkpoints.glob("global_step*"))
    run.note(f"saved after steps {', '.join(map(str, saved))}")
    run.claim("one more checkpoint than without", bool(set(saved) - {10, 20, 30}))


def _controller_stopped(seconds: float, run: StartedRun) -> None:
    run.until(12)
    pid = run.controller_pid
    run.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    run.kill(pid, signal.SIGCONT)


def _everything_stopped(run: StartedRun) -> None:
    run.until(14)
    pids = list(run.processes())
    for pid in pids:
        run.kill(pid, signal.SIGSTOP)
    time.sleep(30)
    for pid in pids:
        run.kill(pid, signal.SIGCONT)


def _term(run: StartedRun) -> None:
    run.until(13)
    run.kill(run.rank_pid(2), signal.SIGTERM)
    run.wait()
    run.claim(f"the reason is stopped, not {run.reason()}", run.reason() == "stopped")
    run.start()


def _segv(run: StartedRun) -> None:
    run.until(18)
    run.kill(run.rank_pid(3), signal.SIGSEGV)


LONGER = {"training": {"steps": 60}}
LONGEST = {"training": {"steps": 100}}
ATTACKS = (
    Attack("controller", "kills", "1. KILL of the controller, and submitted again", _controller, EQUAL),
    Attack("runner", "kills", "2. KILL of a runner", _runner, EQUAL),
    Attack(
        "buddies",
        "kills",
        "3. KILL of two buddies at once",
        _buddies,
        Expected(equal=True, recovered=("checkpoint",)),
    ),
    Attack(
        "all-ranks",
        "kills",
        "4. KILL of all ranks at once",
        _all_ranks,
        Expected(equal=True, recovered=("checkpoint",)),
    ),
    Attack("stop-5s", "stops", "5. SIGSTOP of a rank, SIGCONT after 5 s", _short_stop, UNHURT),
    Attack("stop", "stops", "6. SIGSTOP of a rank for ever", _stop, EQUAL),
    Attack("standbys", "kills", "7. KILL of four standbys, then of a rank", _standbys, EQUAL),
    Attack(
        "every-3s", "kills", "8. KILL of a random rank every 3 s, 9 times", _again_and_again, EQUAL, settings=LONGEST
    ),
    Attack("last-step", "kills", "9. KILL of a rank in the last step", _last_step, EQUAL),
    Attack("final-save", "kills", "10. KILL of rank 0 in the last save", _final_save, EQUAL),
    Attack("exit-0", "kills", "11. a rank leaves with 0 in the middle", _exit_0, EQUAL),
    Attack("cancel", "asked", "12. `bsl cancel` in a recovery, and submitted again", _cancel, EQUAL),
    Attack("usr2", "asked", "13. USR2 in a recovery, and submitted again", _time_limit, EQUAL),
    Attack("control-save", "asked", "15. `bsl control save` in a recovery", _save, EQUAL),
    Attack(
        "controller-8s",
        "stops",
        "16. SIGSTOP of the controller, 8 s",
        lambda run: _controller_stopped(8, run),
        UNHURT,
        settings=LONGER,
    ),
    Attack(
        "controller-16s",
        "stops",
        "17. SIGSTOP of the controller, 16 s",
        lambda run: _controller_stopped(16, run),
        UNHURT,
        settings=LONGEST,
    ),
    Attack("everything-30s", "stops", "18. SIGSTOP of all processes, 30 s", _everything_stopped, UNHURT),
    Attack("term", "asked", "19. SIGTERM to one rank, and submitted again", _term, EQUAL),
    Attack("segv", "kills", "20. SIGSEGV to one rank", _segv, EQUAL),
)
