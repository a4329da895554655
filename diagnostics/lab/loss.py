"""Family D: a rank, or the host of rank 0, is lost. See step_loop.py."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from divergence import LocalSignal
from host_stall import HostStall
from step_loop import REST_S, Training, main


class Killed(HostStall):
    """H70: one rank is killed. With gloo, its peers see the connection close and end too: a crash, not a hang."""

    def stall(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Segfault(HostStall):
    """H71: one rank crashes in native code."""

    def stall(self) -> None:
        ctypes.string_at(0)


class LostWhileOthersWait(Training):
    """H70 as with NCCL: no rank uses a connection to the dead rank; its peers wait for it in the store.

    The ranks that share a group with the culprit wait for a key that it would have set; all others wait for them.
    """

    def get_batch(self) -> Any:
        if self.strikes():
            self.die()
        if self.has_come() and self.shares_group():
            self.wait_for_tag()
        return super().get_batch()

    def shares_group(self) -> bool:
        return any(self.rank in self.place.group_of(self.culprit, axis) for axis in ("tp", "pp", "dp"))

    def wait_for_tag(self) -> None:
        import torch.distributed as dist

        dist.distributed_c10d._get_default_store().wait([f"checkpoint/tag-{self.culprit}"], timedelta(seconds=REST_S))

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class ExitedWhileOthersWait(LostWhileOthersWait):
    """H72: one rank has exited, and the job step continues."""

    def die(self) -> None:
        os._exit(1)


class Zombie(LostWhileOthersWait):
    """H72: one rank has exited, and its parent does not wait for it."""

    def die(self) -> None:
        # A parent that has not stopped yet would reap this process as soon as it ends.
        os.kill(os.getppid(), signal.SIGSTOP)
        while "T" not in state_of(os.getppid()):
            time.sleep(0.02)
        os._exit(1)


class NotReadable(HostStall):
    """H75: a rank that a debugger of the same user is not allowed to read."""

    def stall(self) -> None:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        ctypes.CDLL(None).sleep(int(REST_S))


class StoreHostLost(Training):
    """H76: rank 0, the process that serves the store, no longer answers."""

    def get_batch(self) -> Any:
        if self.strikes(0):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.has_come():
            self.read_from_store()
        return super().get_batch()

    def read_from_store(self) -> None:
        import torch.distributed as dist

        # The stopped rank is the server of the store, so its state is read from /proc instead.
        wait_until_stopped(self)
        dist.distributed_c10d._get_default_store().get("checkpoint/tag")


class HalfDelivered(LocalSignal):
    """H77: the time limit's SIGTERM reaches one rank only."""

    signal = signal.SIGTERM


def wait_until_stopped(training: Training) -> None:
    """Wait until rank 0 has stopped, according to /proc."""
    assert training.run_dir is not None
    struck = training.run_dir / "lab" / "struck-0000"
    while not struck.exists() or "T" not in state_of(int(struck.read_text() or "1")):
        time.sleep(0.02)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]


RECIPES: dict[str, type[Training]] = {
    "killed": Killed,
    "segfault": Segfault,
    "killed-unseen": LostWhileOthersWait,
    "exited": ExitedWhileOthersWait,
    "zombie": Zombie,
    "not-readable": NotReadable,
    "store-host": StoreHostLost,
    "half-delivered": HalfDelivered,
}

if __name__ == "__main__":
    main(RECIPES)
