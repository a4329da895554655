"""Ends what a phase has started, in whatever session it is: launchers and runners begin sessions of their own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

from bigsci_launch.minicluster.proctree import descendants
from bigsci_launch.procfs import read_processes

PR_SET_CHILD_SUBREAPER = 36
END_S = 2.0


def adopt_orphans() -> None:
    """Have processes whose parent has died become children of this one, so that none is lost, and leave on SIGTERM as
    on Ctrl-C."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def end_below(pid: int) -> None:
    """Kill a process and all that it has started; of this process, only what it has started."""
    until = time.monotonic() + END_S
    # Some may start others in the meantime.
    while time.monotonic() < until:
        found = [each for each in descendants([pid], read_processes()) if each != os.getpid()]
        if not found:
            return
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.02)
