"""Reads the ring of a rank, for node_agent.py, also of a process that has ended. Standard library, Python 3.8 or newer.

The file is on this node. The process is not asked and not touched.
"""

from __future__ import annotations

import os
import sys
import time

if "__file__" in globals():
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out

from ring_file import PHASES, REDUCTION, read_ring
from safe_files import open_stream

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Facts = dict[str, Any]

RING_TIMEOUT_S = 4.0
"""A full ring takes 40 ms to read, and much longer on a node whose cores are all in use."""
NUM_FACTS = 11
"""Facts of a call that are reported."""
NUM_LAST = 32
"""Newest calls of each thread that are reported in full."""
NUM_STEPS = 1024
"""Newest steps whose collectives are numbered: ranks are read at different moments, and must have steps in common."""
NUM_ROOTS = 8
"""Newest changes of root that are listed for each collective."""
NUM_KEYS = 64
"""Newest keys that the process set in a store."""
OWN = (*PHASES, REDUCTION)
STACKS_BYTES = 1 << 16
STORE_SETS = ("store.set", "store.add", "store.append", "store.compare_set", "store.multi_set")


def has_ring(rank: Facts, _request: Facts) -> bool:
    """Whether the process was given a folder for a ring."""
    return bool(rank.get("rings")) and bool(rank.get("pid"))


def read_rank_ring(rank: Facts, request: Facts, _known: Facts) -> Iterator[tuple[str, Any]]:
    """Yield the content of the ring, or why there is none."""
    path = os.path.join(rank["rings"], f"{rank['pid']}.ring")
    try:
        with open_stream(path) as stream:
            ring = read_ring(stream.read())
        ticks = rank.get("start_ticks")
        if ticks and ring["start_ticks"] and ring["start_ticks"] != ticks:
            yield "ring_why", f"{path} is of an earlier process with the same number"
        else:
            yield "ring", dict(summarize(ring, request.get("num_calls", NUM_LAST)), **read_stacks(path))
    except (OSError, ValueError) as error:
        yield "ring_why", f"{path}: {getattr(error, 'strerror', None) or error}"


def read_stacks(ring_path: str) -> Facts:
    """Return {stacks: {text, written}}: what faulthandler has written next to a ring, if it has."""
    try:
        with open_stream(os.path.splitext(ring_path)[0] + ".stacks") as stream:
            text = stream.read(STACKS_BYTES).decode("utf-8", "replace")
            return {"stacks": {"text": text, "written": os.fstat(stream.fileno()).st_mtime}} if text else {}
    except OSError:
        return {}


def print_files(paths: list[str], read: Callable[[str], Facts]) -> None:
    """Print {path: what `read(path)` returns, or {why} if it cannot be read} as JSON, for `bsl trace`."""
    import json

    found: Facts = {}
    for path in paths:
        try:
            found[path] = read(path)
        except (OSError, ValueError) as error:
            found[path] = {"why": getattr(error, "strerror", None) or str(error)}
    json.dump(found, sys.stdout)


def read_file(path: str, num_last: int) -> Facts:
    """Return the content of a ring, of each thread `num_last` calls in full, and the stacks next to it."""
    with open_stream(path) as stream:
        return dict(summarize(read_ring(stream.read()), num_last), **read_stacks(path))


def summarize(ring: Facts, num_last: int = NUM_LAST) -> Facts:
    """Return a ring without repetition.

    {rank, world_size, topology, step, phase, heartbeat, read, lost_names, lost_threads, threads: [{tid, name, count,
    last: [call], open: [call]}], open: [call], set_keys: [words], steps: {group: [[number, step, numbers, steps,
    times]]}, roots: [[group, operation, place, [[root, times, number of the newest]]]], are_blocking: whether the work
    of each collective is done when it returns, recorder: the collectives as node_recorder.py gives those of torch}.
    Where more calls than usual are wanted, each thread has `phases` too: what the rank did itself, since the first of
    these calls. Nothing else counts those records.

    A call is [entered, left, operation, group, place, tensors, peer, tag, number, step, is_async]. In a group, `step`
    begins with collective `number`, and that repeats: `times` times, so many `numbers` and `steps` later.
    """
    lanes = [apart(lane, num_last) for lane in ring["lanes"]]
    calls = [call for lane in lanes for call in lane["calls"]]
    kept = ("rank", "world_size", "topology", "step", "phase", "heartbeat", "lost_names", "lost_threads", "is_whole")
    return {
        **{key: ring[key] for key in kept},
        "read": time.time(),
        "threads": [
            {
                **{key: lane[key] for key in ("tid", "name", "count")},
                "last": [call[:NUM_FACTS] for call in lane["calls"][-num_last:]],
                "open": [call[:NUM_FACTS] for call in lane["calls"] if call[1] is None],
                **({"phases": lane["phases"]} if num_last > NUM_LAST else {}),
            }
            for lane in lanes
        ],
        "open": sorted((call[:NUM_FACTS] for call in calls if call[1] is None), key=lambda call: call[0]),
        "set_keys": keys_set(calls),
        "steps": {group: in_runs(begun[-NUM_STEPS:]) for group, begun in steps_begun(calls).items()},
        "roots": roots_named(calls),
        "are_blocking": all(call[11] for lane in ring["lanes"] for call in lane["calls"] if call[8] and not call[10]),
        "recorder": collectives(of_all_threads(lanes)),
    }


def apart(lane: Facts, num_last: int) -> Facts:
    """Return a lane without the records of what the rank does itself, which are its `phases`.

    DDP's reductions of gradients are in both: they count for themselves, whatever else their group does.
    """
    calls = [reduction(call) if call[2] == REDUCTION else call for call in lane["calls"] if call[2] not in PHASES]
    since = calls[-num_last:][0][0] if calls else 0.0
    phases = [call[:NUM_FACTS] for call in lane["calls"] if call[2] in OWN and call[0] >= since]
    return dict(lane, calls=calls, phases=phases, is_full=lane["count"] > len(lane["calls"]))


def reduction(call: list[Any]) -> list[Any]:
    """Return a reduction of gradients as a collective of a group of its own, which has the same members."""
    name, _, ranks = (call[3] or "?").partition(": ")
    return [*call[:3], f"{name} gradients: {ranks}" if ranks else call[3], *call[4:]]


def of_all_threads(lanes: list[Facts]) -> list[list[Any]]:
    """Return the calls since when the ring holds those of every thread: a thread that calls much loses its old ones."""
    full = [lane["calls"][0][0] for lane in lanes if lane["calls"] and lane["is_full"]]
    since = max(full, default=0.0)
    return [call for lane in lanes for call in lane["calls"] if call[0] >= since]


def keys_set(calls: list[list[Any]]) -> list[str]:
    """Return the keys that the process has set, the newest last."""
    found = sorted((call for call in calls if call[2] in STORE_SETS and call[5]), key=lambda call: call[0])
    newest = dict.fromkeys(call[5] for call in reversed(found))
    return list(newest)[:NUM_KEYS][::-1]


def steps_begun(calls: list[list[Any]]) -> dict[str, list[tuple[int, int]]]:
    """Return {group: [(number of the first collective in a step, step)]}, oldest first."""
    by_group: dict[str, dict[int, int]] = {}
    for call in sorted(calls, key=lambda call: call[0]):
        if call[8] and call[3] not in (None, "?"):
            by_group.setdefault(call[3], {}).setdefault(call[8], call[9])  # waiting for it is a later call
    found: dict[str, list[tuple[int, int]]] = {}
    for group, steps in by_group.items():
        begun = found.setdefault(group, [])
        for number in sorted(steps):
            is_first = number == 1 or steps.get(number - 1, steps[number]) != steps[number]
            if is_first:
                begun.append((number, steps[number]))
    return found


def in_runs(begun: list[tuple[int, int]]) -> list[list[int]]:
    """Return steps that begin at even distances as one entry."""
    runs: list[list[int]] = []
    for number, step in begun:
        if runs:
            first, at, numbers, steps, times = runs[-1]
            apart = (number - first - (times - 1) * numbers, step - at - (times - 1) * steps)
            if times == 1 or apart == (numbers, steps):
                runs[-1] = [first, at, apart[0], apart[1], times + 1]
                continue
        runs.append([number, step, 0, 0, 1])
    return runs


def roots_named(calls: list[list[Any]]) -> list[list[Any]]:
    """Return the roots that each collective of the program has named, calls in a row with one root as one entry."""
    found: dict[tuple[str, str, str], list[list[int]]] = {}
    for call in sorted(calls, key=lambda call: call[0]):
        if not call[8] or call[6] is None or call[3] in (None, "?"):
            continue
        runs = found.setdefault((call[3], call[2] or "?", call[4] or "?"), [])
        if runs and runs[-1][2] == call[8]:
            continue  # it is waited for
        if runs and runs[-1][0] == call[6]:
            runs[-1] = [call[6], runs[-1][1] + 1, call[8]]
        else:
            runs.append([call[6], 1, call[8]])
    return [[*key, runs[-NUM_ROOTS:]] for key, runs in found.items()]


def collectives(calls: list[list[Any]]) -> Facts:
    """Return the collectives in the form of torch's recorder. Those that a full ring has lost count as well."""
    found = sorted((call for call in calls if call[8] and call[3] not in (None, "?")), key=lambda call: call[0])
    tokens: dict[tuple[str, ...], int] = {}
    members: dict[str, list[int]] = {}
    numbers: dict[tuple[str, int], int] = {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    stream: list[int] = []
    unfinished: set[int] = set()
    for call in found:
        group, _, ranks = call[3].partition(": ")
        if ranks:
            members[group] = [int(rank) for rank in ranks.split(",")]
        # Waiting for a collective is a call of its own, with the number of the collective.
        position = numbers.get((group, call[8]))
        if position is None:
            position = numbers[(group, call[8])] = len(stream)
            types, _, sizes = (call[5] or "?").rpartition(" [")
            token = (group, "", call[2] or "?", f"[[{sizes}]" if sizes else "[]", f"[{types}]")
            stream.append(tokens.setdefault(token, len(tokens)))
            first.setdefault(group, call[8])
            last[group] = call[8]
        # A call that returned before its work was done is no wait: the work may be done by now.
        if call[1] is None and not call[10]:
            unfinished.add(position)
    return {
        "first_record": sum(number - 1 for number in first.values()),
        "tokens": list(tokens),
        "stream": stream,
        "last_sequence": last,
        "open": sorted(unfinished),
        "members": members,
    }


if __name__ == "__main__":
    print_files(sys.argv[2:], lambda path: read_file(path, int(sys.argv[1])))
