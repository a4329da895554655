"""Requests to stop and to save: a signal, and asked.json. They only raise flags; ranks agree on them in their words at
the end of a step. And how the process of a rank ends."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from bigsci_launch.errors import BslError, ConfigError
from bigsci_launch.runs.control.asked import NOTHING_ASKED, StopWish, read_asked
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.runs.watching.ended import EndedBy, write_ended_by

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
LOOK_S = 2.0


class StopFlag:
    """Whether this rank was asked to stop. Create it before importing torch: a starting rank must survive a signal."""

    def __init__(self) -> None:
        self.is_raised = False
        for number in SIGNALS:
            signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.is_raised = True


class Wishes:
    """What asked.json asks of all ranks, as rank 0 last read it (runs/control/asked.py says why it alone looks)."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._asked = NOTHING_ASKED
        self._granted: set[str] = set()
        self._stop: StopWish | None = None
        self.save_key: str | None = None
        """Key of the save that is due at the end of this step, if people asked for one."""

    def look(self, until: threading.Event) -> None:
        """Read asked.json whenever it has changed. A file system that hangs stops this thread alone."""
        known: tuple[int, int] | None = None
        while True:
            with suppress(OSError):
                found = self._attempt.asked.stat()
                if (found.st_ino, found.st_mtime_ns) != known:
                    self._asked = read_asked(self._attempt)
                    known = found.st_ino, found.st_mtime_ns
            if until.wait(LOOK_S):
                return

    def save_due(self, step: int) -> bool:
        """Whether a save is due at the end of `step`. Each is due once."""
        wish, self.save_key = self._asked.save, None
        if wish is None or wish.key in self._granted or not wish.is_due(step):
            return False
        self._granted.add(wish.key)
        self.save_key = wish.key
        return True

    def stop_due(self, step: int) -> StopWish | None:
        """Return the wish to stop that is due at the end of `step`. Once it is, it remains so."""
        if self._stop is None and (wish := self._asked.stop) is not None and wish.is_due(step):
            self._stop = wish
        return self._stop

    def record_stop(self) -> None:
        """Write who ends the attempt, if the watcher has left that to this rank. The disk may be full."""
        wish = self._stop
        if wish is not None and wish.after_step is not None:
            with suppress(OSError):
                write_ended_by(
                    self._attempt, EndedBy(wish.act, wish.who, wish.why, wish.act == "restart", wish.after_step)
                )


@contextmanager
def watched_wishes(attempt: AttemptDir, rank: int) -> Iterator[Wishes]:
    """Yield what people ask of the ranks of an attempt: on rank 0, read in a thread; on the others, always nothing."""
    wishes, until = Wishes(attempt), threading.Event()
    if rank == 0:
        threading.Thread(target=wishes.look, args=(until,), name="bsl-asked", daemon=True).start()
    try:
        yield wishes
    finally:
        until.set()


def leave() -> None:
    """Leave the process group, as a rank that has finished."""
    # The interpreter gives a signal its default action back while it ends, unless it is ignored: a request to stop that
    # comes now would kill a rank that has finished.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    import torch.distributed as dist

    dist.destroy_process_group()


def end_finished() -> NoReturn:
    """End the process of a rank that has finished, with 0.

    Groups that DeepSpeed or a model still refers to keep their threads, and so do groups that a surviving process has
    given up. A thread that drops a tensor while the interpreter ends aborts the process (PyTorch issue 190489); one
    that is blocked makes it wait. So what is registered for the exit is called, and the interpreter does not end.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_at_once(error: BaseException) -> NoReturn:
    """Print `error` and end the process with its exit status.

    An orderly teardown of the process group would wait for peers that are waiting for this rank.
    """
    code = explain(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def explain(error: BaseException) -> int:
    """Print `error` on stderr and return the exit status for it."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if not isinstance(error, BslError):
        traceback.print_exception(error)
        return 1
    problems = error.problems if isinstance(error, ConfigError) else ()
    for line in [str(problem) for problem in problems] or [error.message]:
        print(f"error: {line}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code
