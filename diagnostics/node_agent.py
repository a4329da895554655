"""Reads what the ranks of one node are doing, without touching them, and prints one document.

Stand-alone with its two neighbours node_processes.py and node_ranks.py: standard library only, Python 3.8 or newer,
no import from the package, so that it runs on a compute node with whatever Python is there:
`python -I -S node_agent.py REQUEST`. (`bsl spy` sends the three files through srun's standard input, for nodes that
cannot see them.) It exits 0 even when ranks could not be read: why they could not is part of the answer.

It never blocks on a process that is stuck, never pauses one (py-spy runs with --nonblocking), and ends by itself.

REQUEST is a JSON object; every key may be left out:
  pid_files        folder of rank-NNNN.json files that name the rank's process (`bsl` writes them)
  job_id           Slurm job, whose processes on this node are asked of Slurm
  launcher_pid     process whose descendants are searched for ranks
  recorder_folder  folder of rank-NNNN.sock sockets that answer with the collectives that torch recorded
  node             name of this node; default: SLURMD_NODENAME, else the host name
  py_spy           path of py-spy; default: beside this Python, then PATH
  samples, interval_s, py_spy_timeout_s, node_timeout_s   2, 1.0, 3.0, 20.0
  framed           print short lines `@bsl NODE INDEX COUNT BASE64(zlib(document))`, for mixed streams; the document is
                   a Python literal then, since the json module takes 8 ms to import on each node

A rank's `samples` hold what the files of /proc said at the beginning and at least `interval_s` later, and `dump`, what
py-spy printed in between. A second dump is taken only of a process of which a thread ran meanwhile: the stacks of one
that did not are the same (`same_stack`).
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

from node_processes import ask_children, read_safe, read_text, run_program, thread_times
from node_ranks import find_ranks

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]

AGENT_VERSION = 1
FRAME_BYTES = 700  # srun forwards whole lines only while they are shorter than 1024 bytes
RECORDER_TIMEOUT_S = 1.0
RECORDER_REQUEST = (
    b"POST /handler/fr_trace_json HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)
DEFAULTS = {"samples": 2, "interval_s": 1.0, "py_spy_timeout_s": 3.0, "node_timeout_s": 20.0}
RANKS_PER_READER = 4
MAX_READERS = 4
MAX_CHILDREN = 32
MAX_TRIES = 3
# x86_64 system calls whose first argument is a file descriptor.
FD_CALLS = {0: "read", 1: "write", 16: "ioctl", 45: "recvfrom", 47: "recvmsg", 72: "fcntl", 73: "flock"}


def read_children(pid: int) -> list[Facts]:
    """Direct children of a rank with the state that the kernel gives them."""
    pids = (read_text(f"/proc/{pid}/task/{pid}/children") or "").split()[:MAX_CHILDREN]
    facts = {int(child): read_safe(int(child)) for child in pids}
    return [
        {"pid": child, "comm": fact.get("comm"), "state": fact["state"], "wchan": fact.get("wchan")}
        for child, fact in facts.items()
    ]


def read_system_call(pid: int) -> Facts | None:
    """The system call in which the main thread waits, and what its file descriptor is, or None."""
    field = (read_text(f"/proc/{pid}/syscall") or "").split()
    if len(field) < 2 or not field[0].isdigit():
        return None
    number = int(field[0])
    if os.uname().machine != "x86_64" or number not in FD_CALLS:
        return {"number": number}
    descriptor = int(field[1], 16)
    try:
        target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        target = None
    return {"number": number, "name": FD_CALLS[number], "fd": descriptor, "target": target}


def read_io(pid: int) -> dict[str, int] | None:
    """Bytes through read and write calls, or None."""
    pairs = (line.split(": ") for line in (read_text(f"/proc/{pid}/io") or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if pair[0] in ("rchar", "wchar")} or None


def ask_recorder(folder: str, rank: int) -> Facts:
    """The collectives that torch recorded in a rank, asked of its worker server; works while the GIL is held."""
    import json
    import socket

    os.chdir(folder)  # a socket's path may have 107 bytes, a run directory's more
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(RECORDER_TIMEOUT_S)
        connection.connect(f"rank-{rank:04d}.sock")
        connection.sendall(RECORDER_REQUEST)
        parts = [connection.recv(1 << 18)]
        while parts[-1]:
            parts.append(connection.recv(1 << 18))
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if b" 200 " not in head[:20]:
        raise OSError(f"answer {head[:40]!r}")
    records = compact_records(json.loads(body)["entries"])
    groups = json.loads(read_text(f"rank-{rank:04d}.json", 1 << 22) or "{}")
    return dict(records, members=groups.get("members", {}))


def compact_records(entries: list[Facts]) -> Facts:
    """Recorded collectives without repetition.

    {first_record, tokens: [[group, group description, operation, sizes, types]], stream: [token index, oldest first],
    last_sequence: {group: number of its newest entry}, open: [positions in `stream` of entries not yet retired]}.
    """
    entries = sorted((entry for entry in entries if not entry.get("is_p2p")), key=lambda entry: entry["record_id"])
    tokens: dict[tuple[str, ...], int] = {}
    last: dict[str, int] = {}
    stream, unfinished = [], []
    for position, entry in enumerate(entries):
        group, description = entry["process_group"]
        operation = entry["profiling_name"].rpartition(":")[2]
        token = (group, description, operation, str(entry["input_sizes"]), str(entry["input_dtypes"]))
        stream.append(tokens.setdefault(token, len(tokens)))
        last[group] = entry["collective_seq_id"]
        if not entry["retired"]:
            unfinished.append(position)
    first = entries[0]["record_id"] if entries else 0
    return {"first_record": first, "tokens": list(tokens), "stream": stream, "last_sequence": last, "open": unfinished}


def find_py_spy(request: Facts) -> str | None:
    """Path of py-spy: as asked, beside this Python, in PATH; or None."""
    places = [os.path.dirname(sys.executable or ""), *os.environ.get("PATH", "").split(":")]
    candidates = [request["py_spy"]] if request.get("py_spy") else [place + "/py-spy" for place in places if place]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def dump_stacks(py_spy: str | None, pid: int, timeout_s: float) -> tuple[str, str]:
    """("dump", py-spy's JSON) or ("why", reason). Tries again when the process moved under the reader."""
    if py_spy is None:
        return "why", "py-spy is not installed on this node"
    argv = [py_spy, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    why = ""
    for _ in range(MAX_TRIES):
        status, output, errors = run_program(argv, timeout_s, {"RUST_BACKTRACE": "0"})
        if status == 0:
            return "dump", output
        if status is None:
            return "why", f"py-spy gave no answer in {timeout_s:g} s"
        why = explain_py_spy(errors)
        if any(words in why for words in ("ermission", "python version", "No such")):
            break
    return "why", why


def explain_py_spy(text: str) -> str:
    """py-spy's error and its causes on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    start = next((index for index, line in enumerate(lines) if line.startswith("Error:")), 0)
    return "py-spy: " + "; ".join(lines[start : start + 4])[:300] if lines else "py-spy said nothing"


def read_rank(rank: Facts, request: Facts) -> Iterator[tuple[str, Any]]:
    """Everything about a rank beyond the safe files, in the order of growing risk."""
    pid = rank["pid"]
    yield "children", read_children(pid)
    yield "system_call", read_system_call(pid)
    yield "io", read_io(pid)
    folder = request.get("recorder_folder") or (rank.get("attempt") and rank["attempt"] + "/recorder")
    if folder and not (rank["samples"] and "recorder_why" in rank["samples"][0]):
        try:
            yield "recorder", ask_recorder(folder, rank["rank"])
        except (OSError, ValueError, KeyError) as error:
            yield "recorder_why", str(error) or type(error).__name__
    yield dump_stacks(request["py_spy"], pid, request["py_spy_timeout_s"])
    yield "dumped", time.monotonic()


def start_sample(rank: Facts) -> Facts:
    """What the safe files say of a rank now. A pid that belongs to another process by now is gone."""
    sample = read_safe(rank["pid"])
    if sample.get("start_ticks") != (rank.get("start_ticks") or sample.get("start_ticks")):
        return {"mono": sample["mono"], "state": "gone"}
    if sample["state"] != "gone":
        sample["thread_times"] = thread_times(rank["pid"])
    return sample


def complete_samples(ranks: list[Facts], request: Facts, deadline: float) -> None:
    """Adds what readers find to the newest sample of each of `ranks`."""

    def produce(indices: list[int]) -> Iterator[tuple[int, str, Any]]:
        for index in indices:
            for name, value in read_rank(ranks[index], request):
                yield index, name, value
            yield index, "done", True

    limit_s = request["py_spy_timeout_s"] + RECORDER_TIMEOUT_S + 0.5
    num_readers = min(request["readers"], -(-len(ranks) // RANKS_PER_READER))
    found = ask_children(list(range(len(ranks))), produce, limit_s, num_readers, deadline)
    for index, rank in enumerate(ranks):
        sample = rank["samples"][-1]
        sample.update(found.get(index, {}))
        if not sample.pop("done", False) and "dump" not in sample:
            sample["stuck"] = True
            sample["why"] = found.get(None, {}).get("error") or f"no answer in {limit_s:g} s"


def first_samples(ranks: list[Facts], request: Facts, deadline: float) -> None:
    """The first look: safe files of all ranks, then everything of those that live."""
    for rank in ranks:
        rank["samples"] = [start_sample(rank)]
    complete_samples([rank for rank in ranks if lives(rank)], request, deadline)


def next_samples(ranks: list[Facts], request: Facts, deadline: float) -> None:
    """A later look: safe files of all ranks; stacks only of processes of which a thread ran since the look before."""
    ranks = [rank for rank in ranks if lives(rank)]
    looked = [rank["samples"][-1] for rank in ranks]
    newest = max((max(sample["mono"], sample.pop("dumped", 0.0)) for sample in looked), default=0.0)
    began = max((sample["mono"] for sample in looked), default=0.0)
    moved = [rank for rank in ranks if not wait_and_compare(rank, began + request["interval_s"], deadline)]
    if moved:
        wait_until(newest + request["interval_s"], deadline)
        complete_samples(moved, request, deadline)


def wait_and_compare(rank: Facts, not_before: float, deadline: float) -> bool:
    """Takes the safe files of a later sample; True when nothing more is to be read: nothing ran, or nothing can be."""
    wait_until(not_before, deadline)
    before, sample = rank["samples"][-1], start_sample(rank)
    rank["samples"].append(sample)
    if not lives(rank):
        return True
    if before.get("stuck"):
        sample["why"], sample["stuck"] = before["why"], True
        return True
    if (
        ("dump" in before or "same_stack" in before)
        and sample["thread_times"]
        and sample["thread_times"] == before["thread_times"]
    ):
        sample["same_stack"] = True
        return True
    return False


def lives(rank: Facts) -> bool:
    """Whether the rank's process was there in its newest sample; says why not otherwise."""
    sample = rank["samples"][-1]
    if sample["state"] in ("gone", "Z"):
        sample["why"] = "the process has ended"
        return False
    return True


def wait_until(moment: float, deadline: float) -> None:
    time.sleep(max(0.0, min(moment, deadline) - time.monotonic()))


def drop_repetition(ranks: list[Facts]) -> None:
    """Keep recorded collectives only once, and before that what counts them."""
    for rank in ranks:
        for before, after in zip(rank["samples"], rank["samples"][1:]):
            if "recorder" in before and "recorder" in after:
                before["recorder"] = {"last_sequence": before["recorder"]["last_sequence"]}


def examine(request: Facts) -> Facts:
    """The document of this node."""
    began = time.monotonic()
    host = os.uname().nodename
    node = request.get("node") or os.environ.get("SLURMD_NODENAME") or host
    request = dict(DEFAULTS, readers=min(MAX_READERS, len(os.sched_getaffinity(0))), **request)
    alarm(int(request["node_timeout_s"]) + 5)  # the last word, whatever happens below
    deadline = began + request["node_timeout_s"]
    request["py_spy"] = find_py_spy(request)
    ranks, how, problems = find_ranks(request, node)
    ranks = [dict(rank, samples=[]) for rank in ranks]
    first_samples(ranks, request, deadline)
    for _ in range(request["samples"] - 1):
        next_samples(ranks, request, deadline)
    drop_repetition(ranks)
    return {
        "agent_version": AGENT_VERSION,
        "node": node,
        "host": host,
        "time": time.time(),
        "clock_ticks_per_s": os.sysconf("SC_CLK_TCK"),
        "found_by": how,
        "py_spy": request["py_spy"],
        "problems": problems,
        "ranks": ranks,
        "wall_s": round(time.monotonic() - began, 3),
        "cpu_s": round(sum(os.times()[:4]), 3),
    }


def frame(document: Facts) -> list[str]:
    """`document` as lines that survive a stream shared with other nodes and with chatter."""
    import binascii
    import zlib

    data = binascii.b2a_base64(zlib.compress(repr(document).encode(), 1), newline=False).decode()
    parts = [data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES)]
    return [f"@bsl {document['node']} {index} {len(parts)} {part}" for index, part in enumerate(parts)]


def print_document(document: Facts, framed: bool) -> None:
    """One line of JSON, or frames."""
    if framed:
        lines = frame(document)
    else:
        import json

        lines = [json.dumps(document)]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def main(request: Facts) -> None:
    """Answer `request` and end."""
    try:
        document = examine(request)
    except Exception as error:
        import traceback

        node = request.get("node") or os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        problems = [f"the node agent failed: {error!r}", traceback.format_exc()[-2000:]]
        document = {"agent_version": AGENT_VERSION, "node": node, "ranks": [], "problems": problems}
    print_document(document, bool(request.get("framed")))
    os._exit(0)  # children that are stuck in the kernel must not hold us


if __name__ == "__main__":
    import json

    main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
