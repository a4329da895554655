"""Users by name, and processes as /proc/PID/stat shows them, which answers whatever state the process is in.

`environ` and `cmdline` are not read: both wait for a lock that a stuck process may hold forever.
"""

from __future__ import annotations

import pwd
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process at the moment it was read. `start_ticks` (since boot) tells it from a later one with its PID.

    `command` is what the kernel calls it: 15 bytes at most, chosen by the process itself, so it may hold anything.
    `cpu_ticks` is the processor time, user and system, of all its threads. Ticks are clock ticks.
    """

    pid: int
    command: str
    state: str
    parent_pid: int
    session: int
    cpu_ticks: int
    start_ticks: int
    group: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether it can run, hold files and have children: a zombie cannot."""
        return self.state not in "ZXx"


def parse_stat(text: str) -> Process:
    """Parse the text of /proc/PID/stat. Only the last parenthesis ends the command: it may hold others, and spaces.

    Raises:
        ValueError: the text is not one of /proc/PID/stat.
    """
    head, _, tail = text.rpartition(")")
    pid, _, command = head.partition(" (")
    field = tail.split()
    if len(field) < 20:
        raise ValueError(f"not the text of /proc/PID/stat: {text[:60]!r}")
    return Process(
        pid=int(pid),
        command=command,
        state=field[0],
        parent_pid=int(field[1]),
        session=int(field[3]),
        cpu_ticks=int(field[11]) + int(field[12]),
        start_ticks=int(field[19]),
        group=int(field[2]),
    )


def read_process(pid: int) -> Process | None:
    """Return the process with that PID; None when there is none, or when it is hidden from this user (`hidepid`)."""
    try:
        data = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    return parse_stat(data.decode("utf-8", "replace"))


def read_processes() -> dict[int, Process]:
    """Return every living process that this user may see, by PID."""
    found = (read_process(int(path.name)) for path in PROC.iterdir() if path.name.isdigit())
    return {process.pid: process for process in found if process is not None and process.is_alive}


def start_ticks(pid: int) -> int | None:
    """Return when a living process started, which together with its PID is unique; None when it is gone."""
    process = read_process(pid)
    return process.start_ticks if process is not None and process.is_alive else None


def user_name(uid: int) -> str:
    """Return the login name of a user, or `uid 1234`."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"uid {uid}"
