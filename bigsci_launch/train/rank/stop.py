"""Requests to stop and to save: a signal, and requests/. They only raise flags; ranks agree on them in their words at
the end of a step. And how the process of a rank ends."""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from bigsci_launch.errors import BslError, ConfigError
from bigsci_launch.runs.control.request import WITH_STEP, Request, follow_requests
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.runs.watching.ended import EndedBy, write_ended_by

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
LOOK_S = 2.0
WRITER = "bsl-save"
"""The name of a thread that writes a rank's part of a checkpoint."""
WRITERS_S = 60.0
"""How long a rank that has failed waits for its part of a checkpoint that is being written."""


class StopFlag:
    """Whether this rank was asked to stop. Create it before importing torch: a starting rank must survive a signal."""

    def __init__(self) -> None:
        self.is_raised = False
        for number in SIGNALS:
            signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.is_raised = True


class StepRequests:
    """What is asked of all ranks, as rank 0 last read it.

    The original kill switch was a file that every rank looked for by itself, between two steps. If it appeared between
    the looks of two ranks, some went into the save and the others into the next step: a deadlock made by the stop
    button. And a file that stayed there stopped every later job too. So rank 0 alone looks, and says it in the words
    that ranks exchange at the end of each step anyway, and each request is granted once.
    """

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._asked: list[Request] = []
        self._granted: set[str] = set()
        self._stop: Request | None = None
        self.save_key: str | None = None
        """Key of the save that is due at the end of this step, if one was requested."""

    def take(self, asked: list[Request]) -> None:
        """Take up what is asked now, from another thread."""
        self._asked = [request for request in asked if request.wrong is None]

    def save_due(self, step: int) -> bool:
        """Whether a save is due at the end of `step`. Each is due once."""
        saves = (each for each in self._asked if each.verb == "save" and each.key not in self._granted)
        self.save_key = next((each.key for each in saves if each.is_due(step)), None)
        if self.save_key is not None:
            self._granted.add(self.save_key)
        return self.save_key is not None

    def stop_due(self, step: int) -> Request | None:
        """Return the newest request to stop, if it is due at the end of `step`. Once it is, it remains so."""
        stop = next((each for each in reversed(self._asked) if each.verb != "save"), None)
        if self._stop is None and stop is not None and stop.is_due(step):
            self._stop = stop
        return self._stop

    def record_stop(self) -> None:
        """Write who ends the attempt, if the watcher has left that to this rank. The disk may be full."""
        stop = self._stop
        if stop is not None and stop.after_step is not None:
            by = EndedBy(stop.verb, stop.who, stop.why, stop.verb == "restart", stop.after_step)
            with suppress(OSError):
                write_ended_by(self._attempt, by)


@contextmanager
def followed_requests(attempt: AttemptDir, rank: int) -> Iterator[StepRequests]:
    """Yield the requests to the ranks of an attempt: on rank 0, read in a thread; on the others, always nothing."""
    requests, until = StepRequests(attempt), threading.Event()
    if rank == 0:
        follow = (attempt, WITH_STEP, LOOK_S, until, requests.take)
        threading.Thread(target=follow_requests, args=follow, name="bsl-requests", daemon=True).start()
    try:
        yield requests
    finally:
        until.set()


def drop_frames(error: BaseException | None) -> None:
    """Let go of the frames that `error` and its causes hold."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


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
    wait_for_writers(WRITERS_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_for_writers(limit_s: float = math.inf) -> None:
    """Wait for the threads of this process that write a part of a checkpoint."""
    until = time.monotonic() + limit_s
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join(None if limit_s == math.inf else max(0.0, until - time.monotonic()))


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
