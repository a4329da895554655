"""A runner that follows one that has died in the same slot. For rank_slot.py and rank_levels.py. Standard library only.

Slurm starts no task of a step again. So a runner that lives on the same node starts the new one, at the place of the
dead one: its numbers, processors and GPUs, which its hello had sent to the controller. Before it serves a rank, the new
runner ends what the dead one has left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from own_place import why_not_ours
from rank_log import say

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

AGAIN = "--again"
CPUS = "cpus"
"""The processors of a task, in what is its own. All other names there are those of variables."""
LONGEST_CPUS = 1024
OF_A_TASK = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
    "PMI_RANK",
    "PMIX_RANK",
)
"""What Slurm sets differently for the tasks of one node, apart from their numbers."""
ROUNDS, PAUSE_S = 100, 0.05
LOOK_S = 10.0
"""The environment of a process that is stuck in the kernel may never be readable."""


def place_of_task() -> dict[str, str]:
    """Return what this task has that others on its node have not: variables, and its processors."""
    own = {name: os.environ[name] for name in OF_A_TASK if name in os.environ}
    cpus = as_ranges(sorted(os.sched_getaffinity(0)))
    return {**own, CPUS: cpus} if len(cpus) <= LONGEST_CPUS else own


def as_ranges(numbers: list[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3 and 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def numbers_in(text: str) -> set[int]:
    """Return the numbers of `0-3,8`. Raises ValueError if it is no such text."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def start_runner(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a runner for another slot of this node, as the controller asks: with the arguments of this one.

    Raises:
        OSError, LookupError, TypeError, ValueError: it cannot be started, or the order is none.
    """
    program = os.path.abspath(sys.argv[0])
    if (why := why_not_ours(Path(program).parent)) is not None:
        raise PermissionError(0, why)
    own = order["place"]
    cpus = numbers_in(own[CPUS]) if own.get(CPUS) else None
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_TASK}
    environment.update({name: own[name] for name in OF_A_TASK if name in own})
    environment.update(SLURM_PROCID=str(int(order["slot"])), SLURM_LOCALID=str(int(order["local_rank"])))

    def prepare() -> None:
        if cpus is not None:
            try:
                os.sched_setaffinity(0, cpus)
            except OSError:
                return  # those of this task will do

    argv = [sys.executable, "-I", "-S", program, AGAIN, str(int(order["runner_pid"])), *without_again(sys.argv[1:])]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=environment, preexec_fn=prepare)


def without_again(words: list[str]) -> list[str]:
    """Return the arguments of a runner without what says that it follows another one, which comes first."""
    return words[2:] if words[:1] == [AGAIN] else words


def end_rest_of_slot(slot: int, attempt: Path, runner_pid: int) -> None:
    """KILL every process that an earlier runner of this slot has left: its ranks, all that they have started, and that
    runner itself, which may only be stopped."""
    rank = {"BSL_SLOT": str(slot), "BSL_RUN_DIR": str(attempt.parent.parent), "BSL_ATTEMPT": attempt.name}
    runner = {"BSL_CONTROLLER_TOKEN": os.environ.get("BSL_CONTROLLER_TOKEN", "")}
    of_rank, of_runner = ({os.fsencode(f"{name}={text}") for name, text in mark.items()} for mark in (rank, runner))

    def end() -> None:
        end_all(slot, lambda pid: is_marked(pid, of_rank) or (pid == runner_pid and is_marked(pid, of_runner)))

    looker = threading.Thread(target=end, daemon=True)
    looker.start()
    looker.join(LOOK_S)
    if looker.is_alive():
        say(f"rank_runner: what an earlier runner of slot {slot} has left could not be ended in {LOOK_S:g} s")


def end_all(slot: int, is_doomed: Callable[[int], bool]) -> None:
    """KILL processes again and again, because they may be starting others."""
    for _ in range(ROUNDS):
        left = [int(name) for name in os.listdir("/proc") if name.isdigit() and is_doomed(int(name))]
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(PAUSE_S)
    say(f"rank_runner: an earlier runner of slot {slot} has left processes that do not end: {left}")


def is_marked(pid: int, mark: set[bytes]) -> bool:
    """Whether a process is ours, is not this one, and began with these variables. A zombie has none."""
    try:
        if pid == os.getpid() or os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return mark <= set(stream.read().split(b"\0"))
    except OSError:
        return False
