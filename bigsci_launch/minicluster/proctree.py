"""Which processes are a cluster's, told by /proc/PID/stat and links only.

`environ` and `cmdline` are not read: both wait for a lock that a stuck process may hold for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process as /proc/PID/stat shows it. `start_ticks` (since boot) tells it from a later one with its PID."""

    pid: int
    parent_pid: int
    state: str
    start_ticks: int
    command: str

    @property
    def is_alive(self) -> bool:
        """Not a zombie: it can run, hold files and have children."""
        return self.state not in "ZX"


def parse_stat(text: str) -> Process:
    """The process behind the text of /proc/PID/stat. The command may hold spaces and parentheses."""
    head, _, tail = text.rpartition(")")
    pid, _, command = head.partition(" (")
    fields = tail.split()
    return Process(
        pid=int(pid), command=command, state=fields[0], parent_pid=int(fields[1]), start_ticks=int(fields[19])
    )


def read_process(pid: int) -> Process | None:
    """The process with that PID, or None when there is none."""
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None


def read_processes() -> dict[int, Process]:
    """Every process that lives at this moment, by PID."""
    found = (read_process(int(path.name)) for path in PROC.iterdir() if path.name.isdigit())
    return {process.pid: process for process in found if process is not None and process.is_alive}


def descendants(roots: Iterable[int], processes: dict[int, Process]) -> list[int]:
    """`roots` and all that descends from them in `processes`, every child before its parent."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent_pid, []).append(process.pid)
    found: list[int] = []
    generation = {pid for pid in roots if pid in processes}
    while generation:
        # A root may be found again as a descendant of another: its later place counts.
        found = [pid for pid in found if pid not in generation] + sorted(generation)
        generation = {child for pid in generation for child in children.get(pid, ())}
    return found[::-1]


def step_daemons(directory: Path, processes: dict[int, Process]) -> set[int]:
    """The slurmstepds of the cluster in `directory`, which slurmd hands over to PID 1: they hold files in there."""
    return {pid for pid, process in processes.items() if _is_step_daemon(process) and _holds_file_in(pid, directory)}


def _is_step_daemon(process: Process) -> bool:
    return process.command == "slurmstepd"


def _holds_file_in(pid: int, directory: Path) -> bool:
    try:
        handles = list((PROC / str(pid) / "fd").iterdir())
    except OSError:
        return False
    return any(_target(handle).startswith(f"{directory}/") for handle in handles)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""
