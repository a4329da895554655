"""Reads the ring of a rank, for node_agent.py, also of a process that has ended. Standard library, Python 3.8 or newer.

The file is on this node. The process is not asked and not touched.
"""

from __future__ import annotations

import os
import sys
import time

if "__file__" in globals():
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out

from ring_file import read_ring

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]

NUM_LAST = 32
"""Newest calls of each thread that are told in full."""
NUM_KEYS = 64
"""Newest keys that the process set in a store."""
STACKS_BYTES = 1 << 16
STORE_SETS = ("store.set", "store.add", "store.append", "store.compare_set", "store.multi_set")


def has_ring(rank: Facts, _request: Facts) -> bool:
    """Whether the process was told where to keep a ring."""
    return bool(rank.get("rings")) and bool(rank.get("pid"))


def read_rank_ring(rank: Facts, _request: Facts, _known: Facts) -> Iterator[tuple[str, Any]]:
    """Yield what the ring says, or why there is none."""
    path = os.path.join(rank["rings"], f"{rank['pid']}.ring")
    try:
        with open(path, "rb") as stream:
            ring = read_ring(stream.read())
        ticks = rank.get("start_ticks")
        if ticks and ring["start_ticks"] and ring["start_ticks"] != ticks:
            yield "ring_why", f"{path} is of an earlier process with the same number"
        else:
            yield "ring", dict(summarize(ring), **read_stacks(path))
    except (OSError, ValueError) as error:
        yield "ring_why", f"{path}: {getattr(error, 'strerror', None) or error}"


def read_stacks(ring_path: str) -> Facts:
    """Return {stacks: {text, written}}: what faulthandler has written next to a ring, if it has."""
    try:
        with open(os.path.splitext(ring_path)[0] + ".stacks", "rb") as stream:
            text = stream.read(STACKS_BYTES).decode("utf-8", "replace")
            return {"stacks": {"text": text, "written": os.fstat(stream.fileno()).st_mtime}} if text else {}
    except OSError:
        return {}


def print_files(paths: list[str], num_last: int) -> None:
    """Print {path: what its ring says, or {why}} as JSON, for `bsl trace`; of each thread `num_last` calls in full."""
    import json

    found: Facts = {}
    for path in paths:
        try:
            with open(path, "rb") as stream:
                found[path] = dict(summarize(read_ring(stream.read()), num_last), **read_stacks(path))
        except (OSError, ValueError) as error:
            found[path] = {"why": getattr(error, "strerror", None) or str(error)}
    json.dump(found, sys.stdout)


def summarize(ring: Facts, num_last: int = NUM_LAST) -> Facts:
    """Return a ring without repetition.

    {rank, world_size, step, phase, heartbeat, read, lost_names, lost_threads, threads: [{tid, name, count, last:
    [call], open: [call]}], open: [call], set_keys: [words], recorder: the collectives as node_recorder.py gives those
    of torch}; a call is [entered, left, operation, group, place, tensors, peer, tag, number, step, is_async].
    """
    calls = [call for lane in ring["lanes"] for call in lane["calls"]]
    kept = ("rank", "world_size", "step", "phase", "heartbeat", "lost_names", "lost_threads", "is_whole")
    return {
        **{key: ring[key] for key in kept},
        "read": time.time(),
        "threads": [
            {
                **{key: lane[key] for key in ("tid", "name", "count")},
                "last": lane["calls"][-num_last:],
                "open": [call for call in lane["calls"] if call[1] is None],
            }
            for lane in ring["lanes"]
        ],
        "open": sorted((call for call in calls if call[1] is None), key=lambda call: call[0]),
        "set_keys": keys_set(calls),
        "recorder": collectives(calls),
    }


def keys_set(calls: list[list[Any]]) -> list[str]:
    """Return the keys that the process has set, the newest last."""
    found = sorted((call for call in calls if call[2] in STORE_SETS and call[5]), key=lambda call: call[0])
    newest = dict.fromkeys(call[5] for call in reversed(found))
    return list(newest)[:NUM_KEYS][::-1]


def collectives(calls: list[list[Any]]) -> Facts:
    """Return the collectives in the form of torch's recorder."""
    found = sorted((call for call in calls if call[8] and call[3] not in (None, "?")), key=lambda call: call[0])
    tokens: dict[tuple[str, ...], int] = {}
    members: dict[str, list[int]] = {}
    numbers: dict[tuple[str, int], int] = {}
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
            last[group] = call[8]
        # A call that returned before its work was done is no wait: nobody knows whether the work is done by now.
        if call[1] is None and not call[10]:
            unfinished.add(position)
    return {
        "first_record": 0,
        "tokens": list(tokens),
        "stream": stream,
        "last_sequence": last,
        "open": sorted(unfinished),
        "members": members,
    }


if __name__ == "__main__":
    print_files(sys.argv[2:], int(sys.argv[1]))
