"""Finds the processes of a cluster: by descent, and by the files that they hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bigsci_launch.procfs import PROC, Process


def descendants(roots: Iterable[int], processes: dict[int, Process]) -> list[int]:
    """Return `roots` and all their descendants in `processes`, every child before its parent."""
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
    """Return the slurmstepds of the cluster in `directory`: children of PID 1 that hold files in there open."""
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
    except OSError:  # it was closed since
        return ""
