"""Reads what the ranks of one node are doing, without touching them, and prints one document.

Stand-alone, together with the other node_*.py files: it uses only the standard library of Python 3.8 or newer, so that
it runs on a compute node with whatever Python is there: `python -I -S node_agent.py REQUEST`. (`bsl spy` sends the
files through srun's standard input, for nodes that cannot see them.) It exits with 0 even if ranks could not be read:
the reason is part of the answer.

It never blocks on a process that is stuck, and it ends on its own. It pauses no process (py-spy runs with
--nonblocking), unless `native` or `flight_recorder` ask for it.

REQUEST is a JSON object; every key is optional:
  pid_files        folder of rank-NNNN.json files that name the rank's process (`bsl` writes them)
  num_ranks        how many ranks there are now, where there may be files of more
  scheduler        which scheduler knows the job, as node_scheduler.py calls it; default: Slurm
  job_id           job, as its scheduler numbers it; the scheduler is asked for its processes on this node
  components       numbers of all components of this job, if it is a heterogeneous one
  step             step of this job, such as `0` or `batch`, to which the ranks belong; default: all are reported
  launcher_pid     process whose descendants are searched for ranks
  recorder_folder  folder of rank-NNNN.sock sockets, which serve the collectives that torch recorded
  node             name of this node; default: SLURMD_NODENAME, else the host name
  py_spy           path of py-spy; default: next to this Python, then PATH
  samples, interval_s, py_spy_timeout_s, node_timeout_s   2, 1.0, 3.0, 20.0
  settle_s         keep looking for this long after the first look, at intervals that double; it is added to
                   node_timeout_s. Default 0: only while a rank runs on the spot, and at most `more_looks` (3) times
  only_rings       true: read rings and call traces, and nothing else that readers find
  native           true: also read native stacks, of processes that can be paused for a moment
  flight_recorder  "fork": get what torch recorded from processes that do not serve it, each through a fork of itself
  framed           print short lines `@bsl NODE INDEX COUNT BASE64(zlib(document))`, for shared streams; the document is
                   then a Python literal, because importing the json module takes 8 ms on each node

Each of a rank's `samples` has the files of /proc, the first at the beginning and each later one at least
`interval_s` after the one before; `dump` is what py-spy printed at that time. Stacks are dumped again only if a thread
of the process has run since: otherwise they are the same (`same_stack`). A loop of native code that waits for its
connections, as gloo's, has no such stack. The last sample also has how long threads have been asleep.
"""

from __future__ import annotations

import os
import sys
import time

try:
    from _signal import alarm  # type: ignore[import-not-found]  # the signal module takes 5 ms to import
except ImportError:
    from signal import alarm

if "__file__" in globals():
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out

from node_calls import read_rank_calls
from node_injection import PULL_TIMEOUT_S, may_pull, read_rank_pulled
from node_kernel import child_ticks, find_locks, read_rank_kernel
from node_motion import read_rank_motion
from node_processes import ask_children, ask_one, read_safe, read_text, thread_times
from node_ranks import find_ranks
from node_recorder import (
    RECORDER_TIMEOUT_S,
    has_recorder,
    has_recorder_file,
    read_rank_file,
    read_rank_recorder,
)
from node_ring import RING_TIMEOUT_S, has_ring, read_rank_ring
from node_scheduler import own_node
from node_stacks import (
    CHILD_TIMEOUT_S,
    NATIVE_TIMEOUT_S,
    choose_children,
    find_py_spy,
    may_dump_native,
    read_child_stacks,
    read_rank_native,
    read_rank_stacks,
)
from node_workers import with_workers
from safe_files import parse_json

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Facts = dict[str, Any]
    # Name; which ranks it concerns; what reads one rank; the limit in seconds.
    Stage = tuple[
        str, Callable[[Facts, Facts], bool], Callable[[Facts, Facts, Facts], Iterator[tuple[str, Any]]], float
    ]

AGENT_VERSION = 1
FRAME_BYTES = 700  # srun forwards whole lines only while they are shorter than 1024 bytes
DEFAULTS = {
    "samples": 2, "interval_s": 1.0, "py_spy_timeout_s": 3.0, "node_timeout_s": 20.0, "settle_s": 0.0, "more_looks": 3,
    "only_rings": False,
}  # fmt: skip
RANKS_PER_READER = 4
MAX_READERS = 4
KERNEL_TIMEOUT_S = 1.0
BUSY_LOAD, MOST_PATIENCE = 4.0, 3.0
LOCKS_TIMEOUT_S = 0.5
SHORTEST_INTERVAL_S = 0.5
LOOP_WAIT = "do_epoll_wait"
LOOK_AROUND = 0.05  # of the time: native threads that run for less only look around
MORE_LOOKS_END_S = 5.5  # no further look starts if it would end later


def start_sample(rank: Facts) -> Facts:
    """Return what the safe files show about a rank now. If its PID was reused by another process, the rank is gone."""
    sample = read_safe(rank["pid"])
    if sample.get("start_ticks") != (rank.get("start_ticks") or sample.get("start_ticks")):
        return {"mono": sample["mono"], "state": "gone"}
    if sample["state"] != "gone":
        sample["thread_times"], sample["run_delay_ns"] = thread_times(rank["pid"])
    return sample


def complete_samples(ranks: list[Facts], request: Facts, deadline: float) -> None:
    """Add to the newest sample of each of `ranks` what readers find, in the order of growing risk.

    Each kind of evidence has its own readers and its own time limit, so that one that blocks loses only itself.
    """
    for stage in stages(request):
        run_stage(stage, ranks, request, deadline)
    for rank in ranks:
        sample = rank["samples"][-1]
        if "dump" not in sample and "why" not in sample:
            sample["why"] = sample.get("unread", {}).get("stacks") or "there was no time left"


def stages(request: Facts) -> list[Stage]:
    """Return what is read from ranks, in order."""
    if request["only_rings"]:
        return []
    return [
        ("kernel", all_ranks, read_rank_kernel, KERNEL_TIMEOUT_S),
        ("recorder", has_recorder, read_rank_recorder, RECORDER_TIMEOUT_S + 0.5),
        ("stacks", all_ranks, read_rank_stacks, request["py_spy_timeout_s"] / request["patience"] + 0.5),
        ("child stacks", has_children, read_child_stacks, CHILD_TIMEOUT_S + 0.5),
    ]


def add_at_the_end(ranks: list[Facts], request: Facts, deadline: float) -> None:
    """Add dumps that already exist; then, only on request, what pauses a process or runs in it.

    This comes after the samples, in which the processes would otherwise seem to move. A ring outlives its process.
    """
    alive = [rank for rank in ranks if rank["samples"][-1]["state"] not in ("gone", "Z")]
    run_stage(("ring", has_ring, read_rank_ring, RING_TIMEOUT_S), ranks, request, deadline)
    run_stage(("calls", has_ring, read_rank_calls, RING_TIMEOUT_S), ranks, request, deadline)
    if request["only_rings"]:
        return
    run_stage(("motion", all_ranks, read_rank_motion, KERNEL_TIMEOUT_S), alive, request, deadline)
    run_stage(("recorder file", has_recorder_file, read_rank_file, RECORDER_TIMEOUT_S + 0.5), alive, request, deadline)
    run_stage(("pulled recorder", may_pull, read_rank_pulled, PULL_TIMEOUT_S), alive, request, deadline)
    run_stage(("native stacks", may_dump_native, read_rank_native, NATIVE_TIMEOUT_S + 0.5), alive, request, deadline)


def all_ranks(_rank: Facts, _request: Facts) -> bool:
    return True


def has_children(rank: Facts, _request: Facts) -> bool:
    """Whether the rank has children whose stacks can be read."""
    return bool(choose_children(rank["samples"][-1]))


def run_stage(stage: Stage, ranks: list[Facts], request: Facts, deadline: float) -> None:
    """Read one kind of evidence from all `ranks`, in parallel. `unread` is those that gave no answer, and why."""
    name, concerns, read, limit_s = stage
    ranks = [rank for rank in ranks if concerns(rank, request)]

    def produce(indices: list[int]) -> Iterator[tuple[int, str, Any]]:
        known: Facts = {}
        for index in indices:
            for key, value in read(ranks[index], request, known):
                yield index, key, value
            yield index, "done", True

    limit_s *= request["patience"]
    num_readers = min(request["readers"], -(-len(ranks) // RANKS_PER_READER))
    found = ask_children(list(range(len(ranks))), produce, limit_s, num_readers, deadline)
    for index, rank in enumerate(ranks):
        sample = rank["samples"][-1]
        sample.update(found.get(index, {}))
        if not sample.pop("done", False):
            why = found.get(None, {}).get("error") or f"no answer in {limit_s:g} s"
            sample["unread"] = dict(sample.get("unread", {}), **{name: why})


def first_samples(ranks: list[Facts], request: Facts, deadline: float) -> None:
    """Take the first sample: the safe files of all ranks, then everything else of those that are alive."""
    for rank in ranks:
        rank["samples"] = [start_sample(rank)]
    complete_samples([rank for rank in ranks if lives(rank)], request, deadline)


def next_samples(ranks: list[Facts], request: Facts, deadline: float) -> None:
    """Take a later sample: the safe files of all ranks; stacks only if a thread ran since the sample before."""
    ranks = [rank for rank in ranks if lives(rank)]
    looked = [rank["samples"][-1] for rank in ranks]
    read = [max(sample["mono"], sample.pop("dumped", 0.0)) for sample in looked]
    began = max((sample["mono"] for sample in looked), default=0.0)
    moved = [not wait_and_compare(rank, began + request["interval_s"], deadline) for rank in ranks]
    if any(moved):
        wait_until(max(at for at, has_moved in zip(read, moved) if has_moved) + request["interval_s"], deadline)
        complete_samples([rank for rank, has_moved in zip(ranks, moved) if has_moved], request, deadline)


def settle(ranks: list[Facts], request: Facts, deadline: float) -> None:
    """Keep looking until `settle_s` after the first sample, at intervals that double."""
    began = min((rank["samples"][0]["mono"] for rank in ranks), default=0.0)
    for at in moments(request["settle_s"]):
        latest = max((rank["samples"][-1]["mono"] for rank in ranks), default=0.0)
        if began + at - latest >= SHORTEST_INTERVAL_S:
            next_samples(ranks, dict(request, interval_s=began + at - latest), deadline)


def moments(settle_s: float) -> list[float]:
    """Return when to look, in seconds after the first sample: about 2, 4, 8, .. s, and at `settle_s`.

    They are jittered, so that what changes at even intervals is not missed each time.
    """
    found, at = [], 2.0
    while 1.5 * at < settle_s:
        found.append(at * (0.9 + 0.2 * chance()))
        at *= 2
    return [*found, settle_s] if settle_s else []


def chance() -> float:
    """Return a random number from 0 to 1; the random module takes too long to import."""
    return os.urandom(1)[0] / 255


def look_more(ranks: list[Facts], request: Facts, deadline: float, began: float) -> None:
    """Take up to `more_looks` further samples while a rank runs on the spot: it may move once in a while."""
    took = 0.0
    for _ in range(request["more_looks"]):
        interval_s = SHORTEST_INTERVAL_S + chance()
        looked = time.monotonic()
        if not any(runs_on_the_spot(rank) for rank in ranks) or looked + interval_s + took > began + MORE_LOOKS_END_S:
            return
        next_samples(ranks, dict(request, interval_s=interval_s), deadline)
        took = time.monotonic() - looked - interval_s


def runs_on_the_spot(rank: Facts) -> bool:
    """Whether a thread of the rank ran before each of its samples, and all of them show the same frames.

    Native threads that wake up to look around, as watchdogs do, are no reason.
    """
    dumps = [sample.get("dump") for sample in rank["samples"]]
    same = len(dumps) > 1 and None not in dumps and len({frames_alone(dump) for dump in dumps}) == 1
    return same and is_at_work(*rank["samples"][-2:])


def is_at_work(before: Facts, after: Facts) -> bool:
    """Whether a thread with frames ran between two samples, or native ones for more than a moment; so if not known."""
    old, new = before.get("thread_times"), after.get("thread_times")
    if not old or not new:
        return True
    ran = {name: time_ns - old.get(name, 0) for name, time_ns in new.items() if time_ns != old.get(name)}
    if any(has_frames(name, after["dump"]) for name in ran):
        return True
    return bool(sum(ran.values()) > LOOK_AROUND * 1e9 * (after["mono"] - before["mono"]))


def has_frames(thread: str, dump: str) -> bool:
    """Whether py-spy's JSON has the thread."""
    return f'"os_thread_id": {thread},' in dump


def frames_alone(dump: str) -> str:
    """Return py-spy's JSON without what changes while a thread stays where it is: whether it runs, or holds the GIL."""
    for name in ("active", "owns_gil"):
        dump = dump.replace(f'"{name}": true', f'"{name}": false')
    return dump


def wait_and_compare(rank: Facts, not_before: float, deadline: float) -> bool:
    """Take the safe files of a later sample. True if nothing is left to read: nothing ran, or nothing can be read."""
    wait_until(not_before, deadline)
    before, sample = rank["samples"][-1], start_sample(rank)
    rank["samples"].append(sample)
    if not lives(rank):
        return True
    if rank["samples"][0].get("children"):
        sample["child_ticks"] = child_ticks(rank["samples"][0]["children"])
    if not sample["thread_times"] or has_run(rank, before["thread_times"], sample["thread_times"]):
        return False
    if "dump" in before or "same_stack" in before:
        sample["same_stack"] = True
    else:
        sample["why"] = before["why"]  # it would give no answer this time either
    return True


def has_run(rank: Facts, before: dict[str, int], after: dict[str, int]) -> bool:
    """Whether a thread that may have other frames now ran, began or ended between two samples."""
    names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    dump = next((sample["dump"] for sample in reversed(rank["samples"]) if "dump" in sample), None)
    loops = {str(thread) for thread in rank["samples"][0].get("thread_waits", {}).get(LOOP_WAIT, ())}
    if dump is None or not loops.issuperset(names) or any(has_frames(name, dump) for name in names):
        return bool(names)
    return any(read_text(f"/proc/{rank['pid']}/task/{name}/wchan") != LOOP_WAIT for name in names)


def lives(rank: Facts) -> bool:
    """Whether the rank's process was alive in its newest sample; if not, the sample has the reason."""
    sample = rank["samples"][-1]
    if sample["state"] in ("gone", "Z"):
        sample["why"] = "the process has ended"
        return False
    return True


def wait_until(moment: float, deadline: float) -> None:
    time.sleep(max(0.0, min(moment, deadline) - time.monotonic()))


def drop_repetition(ranks: list[Facts]) -> None:
    """Keep recorded collectives only in the last sample, and in those before only their counters; a dump only once.

    Of connections, only the last that were read are kept.
    """
    for rank in ranks:
        for sample in [each for each in rank["samples"] if "connections" in each][:-1]:
            del sample["connections"]
        dump = None
        for sample in rank["samples"]:
            if dump is not None and sample.get("dump") == dump:
                del sample["dump"]
                sample["same_stack"] = True
            dump = sample.get("dump") or (dump if sample.get("same_stack") else None)
        for before, after in zip(rank["samples"], rank["samples"][1:]):
            if "recorder" in before and "recorder" in after:
                before["recorder"] = {"last_sequence": before["recorder"]["last_sequence"]}


def all_pids(ranks: list[Facts]) -> set[int]:
    children = [child["pid"] for rank in ranks for child in rank["samples"][0].get("children", ())]
    return {rank["pid"] for rank in ranks}.union(children)


def find_all(request: Facts) -> Facts:
    """Return {node, ranks, others, found_by, problems}: which processes of this node are the ranks."""
    node = request.get("node") or own_node()
    ranks, others, how, problems = find_ranks(request, node)
    if how == "pid files":
        ranks, others = with_workers(ranks, request, problems)
    return {"node": node, "ranks": ranks, "others": others, "found_by": how, "problems": problems}


def patience(num_cores: int) -> float:
    """Return by how much longer than on a quiet node each reader may take: on a busy one, it waits for a core."""
    return min(MOST_PATIENCE, max(1.0, os.getloadavg()[0] / num_cores / BUSY_LOAD))


def examine(request: Facts) -> Facts:
    began = time.monotonic()
    num_cores = len(os.sched_getaffinity(0))
    request = dict(DEFAULTS, readers=min(MAX_READERS, num_cores), patience=patience(num_cores), **request)
    request["py_spy_timeout_s"] *= request["patience"]
    limit_s = request["node_timeout_s"] + request["settle_s"]
    alarm(int(limit_s) + 5)  # ends this program, whatever happens below
    deadline = began + limit_s
    request["py_spy"] = find_py_spy(request)
    if request["py_spy"]:
        import json  # noqa: F401  # it takes 8 ms: here once, and not in every reader of stacks
    found = find_all(request)
    ranks = [dict(rank, samples=[]) for rank in found["ranks"]]
    first_samples(ranks, request, deadline)
    locks = ask_one(lambda: [("locks", find_locks(all_pids(ranks)))], LOCKS_TIMEOUT_S)
    for _ in range(request["samples"] - 1):
        next_samples(ranks, request, deadline)
    if request["settle_s"]:
        settle(ranks, request, deadline)
    elif request["samples"] > 1:
        look_more(ranks, request, deadline, began)
    add_at_the_end(ranks, request, deadline)
    drop_repetition(ranks)
    return describe(dict(found, ranks=ranks), request, began, locks=locks.get("locks", []))


def describe(found: Facts, request: Facts, began: float, **more: Any) -> Facts:
    """Return the document on `found`, which an agent began to read at `began`."""
    return {
        "agent_version": AGENT_VERSION,
        **found,
        "host": os.uname().nodename,
        "time": time.time(),
        "clock_ticks_per_s": os.sysconf("SC_CLK_TCK"),
        "py_spy": request["py_spy"],
        **more,
        "wall_s": round(time.monotonic() - began, 3),
        "cpu_s": round(sum(os.times()[:4]), 3),
    }


def wire_lines(document: Facts) -> list[str]:
    """Return `document` as lines that survive a stream shared with other nodes and other output."""
    import binascii
    import zlib

    data = binascii.b2a_base64(zlib.compress(repr(document).encode(), 1), newline=False).decode()
    parts = [data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES)]
    return [f"@bsl {document['node']} {index} {len(parts)} {part}" for index, part in enumerate(parts)]


def print_document(document: Facts, framed: bool) -> None:
    """Print one line of JSON, or wire lines."""
    if framed:
        lines = wire_lines(document)
    else:
        import json

        lines = [json.dumps(document)]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def answer(request: Facts, examine_ranks: Callable[[Facts], Facts]) -> None:
    """Print what `examine_ranks` returns, or why it failed, and end this program."""
    try:
        document = examine_ranks(request)
    except Exception as error:
        import traceback

        node = request.get("node") or own_node()
        problems = [f"the node agent failed: {error!r}", traceback.format_exc()[-2000:]]
        document = {"agent_version": AGENT_VERSION, "node": node, "ranks": [], "problems": problems}
    print_document(document, bool(request.get("framed")))
    os._exit(0)  # children that are stuck in the kernel must not hold us


def main(request: Facts) -> None:
    answer(request, examine)


if __name__ == "__main__":
    main(parse_json(sys.argv[1]) if len(sys.argv) > 1 else {})
