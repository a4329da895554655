"""Ports on the loopback for clusters that share the machine's network."""

from __future__ import annotations

import fcntl
import os
import pwd
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from bigsci_launch.errors import ClusterError
from bigsci_launch.minicluster.daemons import wait_until

# Above the rendezvous ports of jobs and local attempts (10000 to 29999), and below the ephemeral range of Linux.
FIRST_PORT = 30000
LAST_PORT = 32767
LOCK = ".bsl-ports.lock"
MUTEX_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0


@contextmanager
def port_mutex() -> Iterator[None]:
    """Keep other `up`s of this user from choosing ports until our daemons listen on theirs.

    The mutex is a lock on a file in the home directory that no other user can open. The kernel frees it when we end,
    however that happens. Where that file cannot be, we do without: a port that was taken ends an `up`, with the reason.

    Raises:
        ClusterError: another `up` takes too long.
    """
    handle = _open_lock()
    try:
        if handle is not None and not wait_until(lambda: _can_lock(handle), MUTEX_TIMEOUT_S):
            raise ClusterError(f"another mini cluster of yours is still starting after {MUTEX_TIMEOUT_S:.0f} s")
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _open_lock() -> int | None:
    with suppress(OSError, KeyError):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(_home() / LOCK, flags, 0o600)
        if os.fstat(handle).st_uid == os.geteuid():
            return handle
        os.close(handle)
    return None


def _home() -> Path:
    """Return our home directory. Not from $HOME, which `su` may leave unchanged."""
    return Path(pwd.getpwuid(os.geteuid()).pw_dir)


def _can_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # the file system has no locks
    return True


def find_ports(num_ports: int) -> int:
    """Return the first of `num_ports` consecutive free ports. Each user begins elsewhere: the mutex is one user's.

    Raises:
        ClusterError: there are none.
    """
    firsts = range(FIRST_PORT, LAST_PORT - num_ports + 2, num_ports)
    ours = os.geteuid() % max(1, len(firsts))
    for first in chain(firsts[ours:], firsts[:ours]):
        if all(_is_free(port) for port in range(first, first + num_ports)):
            return first
    raise ClusterError(f"no {num_ports} consecutive free ports from {FIRST_PORT} to {LAST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind(("", port))
            return True
    return False


def is_listening(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        return probe.connect_ex((address, port)) == 0
