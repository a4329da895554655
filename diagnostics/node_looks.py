"""Looks at the ranks of one node at random moments, for as long as is wanted, and prints one document.

A program of its own, `python -I -S node_looks.py REQUEST`, for `bsl slow`; its ranks, its REQUEST and its document are
those of node_agent.py. Standard library only, Python 3.8 or newer. No rank is paused: py-spy reads memory alone, at
moments that it draws from an exponential distribution.

REQUEST has one more key:
  looks_s   how long to look, in seconds

Two recorders look at each rank: one at every thread, one only at threads that run or could run. What the first finds
more often is asleep. They are started again in each of about twelve segments, so that the spread of the segments shows
how much of a difference is chance. The document has `stacks`, a table of texts, outermost frame first, as py-spy
writes them, `lines`, the innermost line of each as its
source has it, and for each rank
  segments  [[[thread, index of the stack, looks of the first recorder, looks of the second]]]; [] if it was not seen
  states    {letter of the kernel: how often the main thread was in it}
  counters  what node_counters.py reads, before and after
"""

from __future__ import annotations

import os
import select
import sys
import time

try:
    from _signal import alarm  # type: ignore[import-not-found]  # the signal module takes 5 ms to import
except ImportError:
    from signal import alarm

if "__file__" in globals():
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out

from node_agent import DEFAULTS, answer, describe, find_all, start_sample
from node_counters import MoreProcesses, add_rank_counters, read_gpus, read_machine, read_places
from node_processes import SIGKILL, ask_one, parse_stat, read_text
from node_stacks import explain_py_spy, find_py_spy
from safe_files import open_stream, parse_json

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]

SEGMENTS = 12
SHORTEST_SEGMENT_S = 2
RATES = {"all": 40, "running": 20}
"""Looks a second of each recorder."""
STATE_INTERVAL_S = 0.1
LATE_S = 6.0
"""A recorder that is so late is ended, and what it saw is lost."""
MAX_OUTPUT = 1 << 23
MAX_STACKS = 4000
MAX_SOURCE, MAX_LINE = 1 << 20, 200
LINES_TIMEOUT_S = 3.0


class Recorder:
    """One py-spy at one rank, for one segment. It writes to a pipe."""

    def __init__(self, py_spy: str, pid: int, seconds: int, kind: str) -> None:
        more = ["--idle"] if kind == "all" else []
        argv = [py_spy, "record", "--nonblocking", "--threads", "--full-filenames", *more, "--format", "raw"]
        argv += ["--rate", str(RATES[kind]), "--duration", str(seconds), "--output", "/dev/fd/3", "--pid", str(pid)]
        self.kind, self.data, self.errors = kind, b"", b""
        self.descriptor, out = os.pipe()
        self.errors_at, errors = os.pipe()
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, out, 3), (os.POSIX_SPAWN_DUP2, errors, 1), (os.POSIX_SPAWN_DUP2, errors, 2)]
        try:
            self.pid = os.posix_spawn(py_spy, argv, {"RUST_BACKTRACE": "0"}, file_actions=actions)
        finally:
            os.close(out)
            os.close(errors)

    def receive(self, descriptor: int) -> bool:
        """Take what has come; False at the end of that stream."""
        found = os.read(descriptor, 1 << 16)
        if descriptor == self.descriptor and len(self.data) < MAX_OUTPUT:
            self.data += found
        elif descriptor == self.errors_at and len(self.errors) < 1 << 16:
            self.errors += found
        return bool(found)

    def close(self, is_over: bool) -> None:
        if not is_over:
            os.kill(self.pid, SIGKILL)
        os.close(self.descriptor)
        os.close(self.errors_at)
        os.waitpid(self.pid, 0 if is_over else os.WNOHANG)


class Segment:
    """All recorders of one segment. `states` counts the states of the ranks during it."""

    def __init__(self, ranks: list[Facts], py_spy: str, seconds: int) -> None:
        self.ends = time.monotonic() + seconds + LATE_S
        self.recorders = {
            (rank["pid"], kind): Recorder(py_spy, rank["pid"], seconds, kind) for rank in ranks for kind in RATES
        }

    def run(self, ranks: list[Facts]) -> None:
        """Wait until all recorders have written what they saw, and count the states of the ranks until then."""
        streams = {at: each for each in self.recorders.values() for at in (each.descriptor, each.errors_at)}
        next_states = 0.0
        while streams and time.monotonic() < self.ends:
            if time.monotonic() >= next_states:
                count_states(ranks)
                next_states = time.monotonic() + STATE_INTERVAL_S
            for at in select.select(list(streams), [], [], STATE_INTERVAL_S)[0]:
                if not streams[at].receive(at):
                    del streams[at]
        left = set(streams.values())
        for each in self.recorders.values():
            each.close(each not in left)


def count_states(ranks: list[Facts]) -> None:
    for rank in ranks:
        stat = read_text(f"/proc/{rank['pid']}/stat")
        if stat:
            state = parse_stat(stat)["state"]
            rank["states"][state] = rank["states"].get(state, 0) + 1


def rows_of(text: str) -> dict[tuple[str, str], int]:
    """Parse `thread (4711): MainThread;main (train.py:3);step (train.py:9) 17` to {(thread, frames): looks}."""
    found: dict[tuple[str, str], int] = {}
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, _, frames = stack.partition(";")
        if count.isdigit() and frames:
            found[thread, frames] = found.get((thread, frames), 0) + int(count)
    return found


def take_segment(rank: Facts, segment: Segment, table: dict[str, int]) -> None:
    """Add what the recorders of a segment saw of a rank; if they saw nothing, why."""
    every, running = (segment.recorders[rank["pid"], kind] for kind in RATES)
    seen, active = (rows_of(each.data.decode("utf-8", "replace")) for each in (every, running))
    if not seen:
        rank["why"] = explain_py_spy(every.errors.decode("utf-8", "replace"))
    rank["segments"].append(
        [
            [key[0], index, seen.get(key, 0), active.get(key, 0)]
            for key in {**seen, **active}
            if (index := index_of(key[1], table)) is not None
        ]
    )


def index_of(stack: str, table: dict[str, int]) -> int | None:
    if stack not in table and len(table) >= MAX_STACKS:
        return None
    return table.setdefault(stack, len(table))


def look(ranks: list[Facts], request: Facts, table: dict[str, int], processes: MoreProcesses) -> None:
    """Look at the ranks in segments until the time is over."""
    segment_s = max(SHORTEST_SEGMENT_S, round(request["looks_s"] / SEGMENTS))
    until = time.monotonic() + max(request["looks_s"], segment_s)
    while time.monotonic() + segment_s / 2 <= until:
        alive = [rank for rank in ranks if os.path.exists(f"/proc/{rank['pid']}")]
        if not alive:
            return
        segment = Segment(alive, request["py_spy"], segment_s)
        segment.run(alive)
        for rank in alive:
            take_segment(rank, segment, table)
        processes.scan()


def read_lines(ranks: list[Facts], stacks: list[str]) -> dict[str, str]:
    """Return {innermost frame: its line in the source}, as far as that is there and can be read."""

    def produce() -> Iterator[tuple[str, Any]]:
        texts: dict[str, list[str]] = {}
        found: dict[str, str] = {}
        for frame in {stack.rpartition(";")[2] for stack in stacks}:
            path, _, number = frame.rpartition(" (")[2].rstrip(")").rpartition(":")
            if path.startswith("/") and path not in texts:
                texts[path] = read_source(f"/proc/{ranks[0]['pid']}/root{path}")
            lines = texts.get(path, [])
            if number.isdigit() and 0 < int(number) <= len(lines):
                found[frame] = lines[int(number) - 1].strip()[:MAX_LINE]
        yield "lines", found

    return dict(ask_one(produce, LINES_TIMEOUT_S).get("lines", {})) if ranks else {}


def read_source(path: str) -> list[str]:
    try:
        with open_stream(path, follow=True) as file:
            return file.read(MAX_SOURCE).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return []


def examine(request: Facts) -> Facts:
    began = time.monotonic()
    request = {**DEFAULTS, "looks_s": 60.0, **request}
    alarm(int(request["looks_s"] + request["node_timeout_s"]) + 5)  # ends this program, whatever happens below
    request["py_spy"] = find_py_spy(request)
    found = find_all(request)
    ranks = [dict(rank, samples=[start_sample(rank)], segments=[], states={}, counters=[]) for rank in found["ranks"]]
    if request["py_spy"] is None:
        found["problems"].append("py-spy is not installed on this node")
        ranks = []
    table: dict[str, int] = {}
    processes = MoreProcesses({rank["pid"] for rank in ranks})
    machine = [dict(read_machine(), gpus=read_gpus())]
    add_rank_counters(ranks)
    look_began = time.monotonic()
    if ranks:
        look(ranks, request, table, processes)
    looked_s = time.monotonic() - look_began
    add_rank_counters(ranks)
    machine.append(dict(read_machine(), gpus=read_gpus()))
    return describe(
        dict(found, ranks=ranks), request, began, stacks=list(table),
        lines=read_lines(ranks, list(table)), looked_s=round(looked_s, 3), machine=machine,
        processes=processes.busiest(), places=read_places(ranks),
    )  # fmt: skip


def main(request: Facts) -> None:
    answer(request, examine)


if __name__ == "__main__":
    main(parse_json(sys.argv[1]) if len(sys.argv) > 1 else {})
