"""Ends communication that this process is blocked in, from another thread. The only module that knows how.

gloo: `abort` of a group ends no wait, but an operation whose socket is shut down raises within milliseconds; so do the
calls of a store, and pending sends. Listening sockets are left alone, because gloo aborts the process if one fails. The
agent's descriptor is a Unix socket, so it is never touched.

NCCL: the communicators of each group are aborted through torch. What is blocked then returns without an error, and the
kernels leave garbage in their outputs, so a step counts only if the generation still ran after it. The groups are
aborted at the same time: the abort of one can wait for the kernel of another. torch still knows them afterwards,
because DeepSpeed asks for its rank while its engine is destroyed; `tear_down` makes it forget them. A communicator that
is being formed cannot be aborted: if its peer never comes, the runner kills the process. This was tried on a backend of
gloo that blocks in the same way, `tests/support/nccl_like`, and never between two cards. What each version of torch
does is in `docs/explanation/nccl.md`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any
from weakref import WeakSet

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_ABORTS = ("abort", "_abort", "_shutdown")
"""What aborts: a group, in newer versions of torch; before that a backend, by one of these names."""
_aborted: WeakSet[Any] = WeakSet()
"""Groups whose abort has begun."""


def end_blocked_communication() -> None:
    """Make every communication of this process with its peers fail, now. Called again, it ends what has begun since."""
    _abort_groups()
    _shut_down_sockets()


def _abort_groups() -> None:
    known: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if known is None:
        return
    # Another thread may be forming or destroying groups; what is missed is found by the next call.
    with contextlib.suppress(RuntimeError):
        for group, (backend, _) in list(known._world.pg_map.items()):
            if backend != "gloo" and group not in _aborted:
                _aborted.add(group)
                threading.Thread(target=_abort, args=(group,), name="bsl-abort", daemon=True).start()


def _abort(group: Any) -> None:
    if hasattr(group, "abort"):
        target = group
    else:
        import torch

        target = group._get_backend(torch.device("cuda"))
    name = next(each for each in _ABORTS if hasattr(target, each))
    # torch raises if the abort has not ended within the time-out of the group; by then the process has been killed.
    with contextlib.suppress(RuntimeError):
        getattr(target, name)()


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
