"""Reads what the ranks of one node are doing, without touching them, and prints one JSON document.

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
  framed           print the document as short lines `@bsl NODE INDEX COUNT BASE64(zlib(JSON))`, for mixed streams
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import zlib

if "__file__" in globals():
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out

from node_processes import Reader, read_safe, read_text, run_readers
from node_ranks import find_ranks

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Facts = dict[str, Any]

AGENT_VERSION = 1
FRAME_BYTES = 700  # srun forwards whole lines only while they are shorter than 1024 bytes
RECORDER_TIMEOUT_S = 1.0
RECORDER_REQUEST = (
    b"POST /handler/fr_trace_json HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)
DEFAULTS = {"samples": 2, "interval_s": 1.0, "py_spy_timeout_s": 3.0, "node_timeout_s": 20.0}
MAX_CHILDREN = 32
# x86_64 system calls whose first argument is a file descriptor.
FD_CALLS = {0: "read", 1: "write", 16: "ioctl", 45: "recvfrom", 47: "recvmsg", 72: "fcntl", 73: "flock"}


def thread_times(pid: int) -> dict[str, int]:
    """{thread id: nanoseconds on a CPU}. A thread whose number stands still has not moved."""
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return {}
    texts = {name: read_text(f"/proc/{pid}/task/{name}/schedstat") for name in names}
    return {name: int(text.split()[0]) for name, text in texts.items() if text}


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
    import socket  # 5 ms that most jobs can do without

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


def dump_stacks(py_spy: str, pid: int, timeout_s: float) -> Facts:
    """Stacks of all threads of `pid`: {threads} or {why}. Tries again when the process moved under the reader."""
    argv = [py_spy, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    environment = {"RUST_BACKTRACE": "0", "PATH": os.environ.get("PATH", "")}
    error = ""
    for _ in range(3):
        try:
            done = subprocess.run(
                argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return {"why": f"py-spy gave no answer in {timeout_s:g} s"}
        if done.returncode == 0:
            return {"threads": compact_threads(json.loads(done.stdout))}
        error = explain_py_spy(done.stderr.decode("utf-8", "replace"))
        if any(words in error for words in ("ermission", "python version", "No such")):
            break
    return {"why": error}


def explain_py_spy(text: str) -> str:
    """py-spy's error and its causes on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    start = next((index for index, line in enumerate(lines) if line.startswith("Error:")), 0)
    return "py-spy: " + "; ".join(lines[start : start + 4])[:300] if lines else "py-spy said nothing"


def compact_threads(threads: list[Facts]) -> list[Facts]:
    """py-spy's threads, innermost frame first, without the fields that nobody reads."""
    return [
        {
            "tid": thread["os_thread_id"],
            "name": thread["thread_name"],
            "active": thread["active"],
            "owns_gil": thread["owns_gil"],
            "frames": [{"function": f["name"], "file": f["filename"], "line": f["line"]} for f in thread["frames"]],
        }
        for thread in threads
    ]


def stood_still(previous: Facts, times: dict[str, int]) -> bool:
    """Whether no Python thread of the process ran since the `previous` sample: then its stacks are the same."""
    if not previous.get("stack"):
        return False
    before = previous.get("thread_times", {})
    tids = [str(thread["tid"]) for thread in previous["stack"]["threads"]]
    return bool(tids) and all(tid in before and before[tid] == times.get(tid) for tid in tids)


def read_rank(rank: Facts, request: Facts, previous: Facts | None) -> Iterator[tuple[str, Any]]:
    """Everything about a rank beyond the safe files, in the order of growing risk."""
    pid = rank["pid"]
    times = thread_times(pid)
    yield "thread_times", times
    yield "children", read_children(pid)
    yield "system_call", read_system_call(pid)
    yield "io", read_io(pid)
    folder = request.get("recorder_folder") or (rank.get("attempt") and rank["attempt"] + "/recorder")
    if folder and not (previous and "recorder_why" in previous):
        try:
            yield "recorder", ask_recorder(folder, rank["rank"])
        except (OSError, ValueError, KeyError) as error:
            yield "recorder_why", str(error) or type(error).__name__
    if previous and stood_still(previous, times):
        yield "stack", previous["stack"]
    elif request["py_spy"]:
        found = dump_stacks(request["py_spy"], pid, request["py_spy_timeout_s"])
        yield ("stack", found) if "threads" in found else ("why", found["why"])
    else:
        yield "why", "py-spy is not installed on this node"


def start_sample(rank: Facts, request: Facts, previous: Facts | None) -> Reader:
    """Reads the safe files here and leaves the rest to a reader, unless one got stuck on this rank before."""
    sample = read_safe(rank["pid"])
    if sample.get("start_ticks") != (rank.get("start_ticks") or sample.get("start_ticks")):
        sample = {"mono": sample["mono"], "state": "gone"}  # the pid belongs to another process now
    rank["samples"].append(sample)
    why = "the process has ended" if sample["state"] in ("gone", "Z") else ""
    if previous and previous.get("stuck"):
        why = why or previous["why"]
    if why:
        return Reader(sample, lambda: [("why", why)], 1.0)
    limit_s = request["py_spy_timeout_s"] + RECORDER_TIMEOUT_S + 0.5
    return Reader(sample, lambda: read_rank(rank, request, previous), limit_s)


def sample_ranks(ranks: list[Facts], request: Facts, deadline: float) -> None:
    """One sample of every rank, appended to its `samples`, each at least `interval_s` after the one before."""

    def starter(rank: Facts) -> Callable[[], Reader | None]:
        previous = rank["samples"][-1] if rank["samples"] else None
        not_before = previous["mono"] + request["interval_s"] if previous else 0.0
        return lambda: start_sample(rank, request, previous) if time.monotonic() >= not_before else None

    alive = [rank for rank in ranks if not rank["samples"] or rank["samples"][-1]["state"] != "gone"]
    for reader in run_readers([starter(rank) for rank in alive], request["workers"], deadline):
        sample = reader.key
        sample.update(reader.facts)
        if "stack" not in sample and "why" not in sample:
            sample["stuck"] = not reader.finished
            sample["why"] = sample.pop("error", f"no answer in {time.monotonic() - reader.began:.1f} s")


def drop_repetition(ranks: list[Facts]) -> None:
    """Keep what moved between samples, not what did not: stacks and recorded collectives only once."""
    for rank in ranks:
        for before, after in zip(rank["samples"], rank["samples"][1:]):
            if "stack" in after and after["stack"] == before.get("stack"):
                del after["stack"]
                after["same_stack"] = True
            if "recorder" in before and "recorder" in after:
                before["recorder"] = {"last_sequence": before["recorder"]["last_sequence"]}


def examine(request: Facts) -> Facts:
    """The document of this node."""
    began = time.monotonic()
    host = os.uname().nodename
    node = request.get("node") or os.environ.get("SLURMD_NODENAME") or host
    request = dict(DEFAULTS, workers=max(2, min(4, len(os.sched_getaffinity(0)))), **request)
    signal.alarm(int(request["node_timeout_s"]) + 5)  # the last word, whatever happens below
    request["py_spy"] = find_py_spy(request)
    ranks, how, problems = find_ranks(request, node)
    ranks = [dict(rank, samples=[]) for rank in ranks]
    for _ in range(request["samples"]):
        sample_ranks(ranks, request, began + request["node_timeout_s"])
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
    data = base64.b64encode(zlib.compress(json.dumps(document).encode(), 6)).decode()
    parts = [data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES)]
    return [f"@bsl {document['node']} {index} {len(parts)} {part}" for index, part in enumerate(parts)]


def main(argv: list[str]) -> None:
    """Answer the request in `argv[1]`."""
    request = json.loads(argv[1]) if len(argv) > 1 else {}
    try:
        document = examine(request)
    except Exception as error:
        import traceback

        node = request.get("node") or os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        problems = [f"the node agent failed: {error!r}", traceback.format_exc()[-2000:]]
        document = {"agent_version": AGENT_VERSION, "node": node, "ranks": [], "problems": problems}
    lines = frame(document) if request.get("framed") else [json.dumps(document)]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    os._exit(0)  # children that are stuck in the kernel must not hold us


if __name__ == "__main__":
    main(sys.argv)
