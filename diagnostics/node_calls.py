"""Reads the call trace of a rank, for node_agent.py, also of a process that has ended. Standard library, Python 3.8.

The file is on this node. The process is not asked and not touched.
"""

from __future__ import annotations

import os
import sys

if "__file__" in globals():
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out

from calls_file import read_calls_file
from node_ring import print_files
from safe_files import open_stream

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]

NUM_LAST = 32
"""Newest calls of each thread that are sent."""


def read_rank_calls(rank: Facts, _request: Facts, _known: Facts) -> Iterator[tuple[str, Any]]:
    """Yield the newest calls of a rank that traces some, or why they cannot be read."""
    path = os.path.join(rank["rings"], f"{rank['pid']}.calls")
    try:
        with open_stream(path) as stream:
            trace = read_calls_file(stream.read())
        ticks = rank.get("start_ticks")
        if not (ticks and trace["start_ticks"] and trace["start_ticks"] != ticks):
            yield "calls", summarize(trace, NUM_LAST)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield "calls_why", f"{path}: {getattr(error, 'strerror', None) or error}"


def read_file(path: str, num_last: int) -> Facts:
    """Return the content of a call trace, of each thread the newest calls."""
    with open_stream(path) as stream:
        return summarize(read_calls_file(stream.read()), num_last)


def summarize(trace: Facts, num_last: int) -> Facts:
    """Return a call trace with the newest `num_last` calls of each thread, and those that have not ended."""
    threads = [dict(thread, calls=thread["calls"][-num_last:]) for thread in trace["threads"]]
    return dict(trace, threads=threads)


if __name__ == "__main__":
    print_files(sys.argv[2:], lambda path: read_file(path, int(sys.argv[1])))
