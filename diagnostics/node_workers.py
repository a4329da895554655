"""Finds the ranks that the tasks of a run have started, for node_agent.py. Standard library, Python 3.8 or newer.

The PID files of a run name its tasks. Where a task is a launcher (torchrun, a shell), or a program that spawns ranks,
the rings next to its own show which process is which rank, and for those that have not joined yet their environment.
"""

from __future__ import annotations

import os

from node_identity import identify, role_of
from node_numbers import GUESS, STORE
from node_processes import ask_one, descendants, parents, read_text
from node_ranks import number_ranks
from ring_file import read_ring
from safe_files import open_stream

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from typing import Any

    Facts = dict[str, Any]

SOURCE = "ring"
READ_TIMEOUT_S = 2.0


def with_workers(ranks: list[Facts], request: Facts, problems: list[str]) -> tuple[list[Facts], list[Facts]]:
    """Return the ranks, with workers in place of tasks that started some, and the other processes of such tasks."""
    found, others = [], []
    read = ask_one(lambda: [("rings", [rings_of(task) for task in ranks])], READ_TIMEOUT_S).get("rings")
    tasks = identify([task["pid"] for task in ranks], [])
    for task, rings in zip(ranks, read or [[]] * len(ranks)):
        role = role_of(tasks[task["pid"]]) if task["pid"] in tasks else None
        if (role is None or role[0] != "launcher") and all(ring["pid"] == task["pid"] for ring in rings):
            found.append(task)
            continue
        below = {task["pid"]} | descendants(task["pid"], parents())
        workers = [as_worker(task, ring) for ring in rings if ring["pid"] in below]
        if len({worker["rank"] for worker in workers}) < len(workers):
            workers = []  # they have the number of the task until they have joined
        named, more = number_ranks(identify(sorted(below), problems), {}, task["pid"], request)
        pids, numbers = ({worker[key] for worker in workers} for key in ("pid", "rank"))
        named = [rank for rank in named if rank["pid"] not in pids and rank["rank"] not in numbers]
        workers += [dict(rank, rings=task.get("rings")) for rank in named if rank["source"] not in (GUESS, STORE)]
        found += sorted(workers, key=lambda worker: worker["rank"]) or [task]
        others += [other for other in more if workers and other["pid"] not in pids]
    return found, others


def rings_of(task: Facts) -> list[Facts]:
    """Return {pid, rank, world_size, start_ticks} of the living processes of a task that take part, from their rings.

    That of the task alone is not read: nearly always, there is no other.
    """
    folder, rings = task.get("rings"), []
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".ring")] if folder else []
    except OSError:
        names = []
    for name in names if names != [f"{task['pid']}.ring"] else []:
        try:
            with open_stream(f"{folder}/{name}") as stream:
                ring = read_ring(stream.read())
        except (OSError, ValueError):
            continue
        if takes_part(ring) and lives(ring):
            rings.append({key: ring[key] for key in ("pid", "rank", "world_size", "start_ticks")})
    return rings


def lives(ring: Facts) -> bool:
    """Whether the process of a ring is there, and not another one with its number."""
    words = (read_text(f"/proc/{ring['pid']}/stat") or "").rpartition(")")[2].split()
    return len(words) > 19 and ring["start_ticks"] in (0, int(words[19]))


def takes_part(ring: Facts) -> bool:
    """As in rank_rings.py: a launcher only has a store."""
    calls = (call for lane in ring["lanes"] for call in lane["calls"])
    return any(call[2] == "init_process_group" or call[8] or call[6] is not None for call in calls)


def as_worker(task: Facts, ring: Facts) -> Facts:
    """Return the record of a rank that a task has started."""
    files = [path[: -len(str(task["rank"]))] + str(ring["rank"]) for path in task.get("recorder_files") or ()]
    return dict(task, **ring, source=SOURCE, coordinate=None, recorder_files=files)
