"""Ends communication that this process is blocked in, from another thread. The only module that knows how.

gloo: `abort` of a group ends no wait, but an operation whose socket is shut down raises within milliseconds; so do the
calls of a store, and pending sends. Listening sockets are left alone, because gloo aborts the process if one fails. The
agent's descriptor is a Unix socket, so it is never touched.

NCCL: all communicators are aborted through torch. This has NOT been tested: no machine with several GPUs was at hand.
Kernels that were aborted leave garbage in their outputs, so a step counts only if the generation still ran after it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

_INTERNET = (socket.AF_INET, socket.AF_INET6)


def end_blocked_communication() -> None:
    """Make every communication of this process with its peers fail, now. Called again, it ends what has begun since."""
    _abort_nccl()
    _shut_down_sockets()


def _abort_nccl() -> None:
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is None or not groups.is_initialized() or groups.get_backend() != "nccl":
        return
    # Another thread may be destroying the groups at the same time; then there is nothing left to abort.
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        groups._abort_process_group()


def _shut_down_sockets() -> None:
    for entry in list(Path("/proc/self/fd").iterdir()):
        # Descriptors are closed and opened by other threads while this one looks at them.
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                _shut_down(os.dup(int(entry.name)))


def _shut_down(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as found:
        is_listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if found.family in _INTERNET and not is_listening:
            found.shutdown(socket.SHUT_RDWR)
