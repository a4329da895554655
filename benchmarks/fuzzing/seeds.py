"""Small sound inputs: files by name, whose content is bytes, or a document that is written as JSON or as a pickle."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Files = Mapping[str, Any]
TORCH = "torch/distributed/distributed_c10d.py"
WAITS = (("all_reduce", TORCH, 2501), ("step", "train.py", 40), ("<module>", "train.py", 9))
READS = (("read_shard", "data.py", 88), ("step", "train.py", 31), ("<module>", "train.py", 9))
RANKS = range(4)


def calls_of(rank: int) -> tuple[tuple[str, str, int], ...]:
    return READS if rank == 2 else WAITS


def py_spy(rank: int) -> str:
    frames = "".join(f"    {name} ({file}:{line})\n" for name, file, line in calls_of(rank))
    head = f"Process {70 + rank}: python -u train.py --rank {rank}\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
    other = f'Thread {170 + rank} (idle): "worker"\n    wait (threading.py:320)\n'
    return f'{head}Thread {70 + rank} (active+gil): "MainThread"\n{frames}{other}\n'


def py_spy_json(rank: int) -> list[dict[str, Any]]:
    frames = [
        {"name": name, "filename": f"/site/{file}", "short_filename": file, "line": line, "locals": None}
        for name, file, line in calls_of(rank)
    ]
    about = {"pid": 70 + rank, "command_line": "python train.py", "parent": {"pid": 7}}
    thread = {"pid": 70 + rank, "thread_id": 9, "thread_name": "MainThread", "os_thread_id": 70 + rank, "active": True}
    return [{**thread, "owns_gil": False, "frames": frames, "process_info": about}]


def faulthandler(rank: int) -> str:
    frames = "".join(f'  File "/site/{file}", line {line} in {name}\n' for name, file, line in calls_of(rank))
    return f"Timeout (0:05:00)!\nThread 0x00007f24{rank}fb36c0 (most recent call first):\n{frames}\n"


def gdb(rank: int) -> str:
    return (
        f'[New LWP {700 + rank}]\nThread 1 (Thread 0x7f68 (LWP {70 + rank}) "python"):\n'
        "#0  0x00007f68194a8adf in poll () from /lib/x86_64-linux-gnu/libc.so.6\n"
        "#1  0x00007f67471be402 in pncclAllReduce (comm=0x1, count=5) from /usr/lib/libnccl.so.2\n"
        "#2  Frame 0x7f1, for file /src/data.py, line 88, in read_shard (x=1)\n"
    )


def pystack(rank: int) -> str:
    frames = "".join(
        f'    (Python) File "/site/{file}", line {line}, in {name}\n        {name}()\n'
        for name, file, line in reversed(calls_of(rank))
    )
    return f"Traceback for thread {70 + rank} (python) [Has the GIL] (most recent call last):\n{frames}\n"


def debug_server(rank: int) -> str:
    return f"=== Rank {rank}: http://n{rank}:25999 ===\n{faulthandler(rank)}"


def ray_stack(rank: int) -> str:
    return f"Stack dump for me  {70 + rank}  0.1  2.0  99 88 ?  Sl  10:00  0:01 ray::Worker.run\n{py_spy(rank)}"


def together(text: Any, label: str = "") -> bytes:
    return "".join(f"{label and f'{rank}: '}{line}\n" for rank in RANKS for line in text(rank).splitlines()).encode()


STACKS: tuple[Files, ...] = (
    {f"rank-{rank}.txt": py_spy(rank).encode() for rank in RANKS},
    {"all-n0.txt": together(py_spy)},
    {"labelled.txt": together(py_spy, "rank")},
    {"trace-n0.1.out": together(py_spy), "trace-n0.2.out": together(py_spy)},
    {f"rank-{rank}.json": py_spy_json(rank) for rank in RANKS},
    {f"rank-{rank}.log": faulthandler(rank).encode() for rank in RANKS},
    {f"rank-{rank}.txt": gdb(rank).encode() for rank in RANKS},
    {f"{rank}.txt": pystack(rank).encode() for rank in RANKS},
    {"stacks_1.txt": together(debug_server), "error.txt": b"=== Rank 4: http://n4:1 ===\nError: 503\n"},
    {"ray.txt": together(ray_stack)},
    {"m.txt": f"{py_spy(0)}Process 71: python train.py\nError: Failed to suspend process\n{py_spy(2)}".encode()},
)


def entry(number: int, group: str = "0", state: str = "completed", **more: Any) -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": int(group), "process_group": [group, "default_pg"], "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": "nccl:all_reduce", "input_sizes": [[8]],
        "input_dtypes": ["Float"], "output_sizes": [[8]], "output_dtypes": ["Float"], "state": state, "retired": False,
        "is_p2p": False, "thread_name": "python", "thread_id": "7", "time_created_ns": 1_700_000_000_000_000_000,
        "frames": [{"name": name, "filename": file, "line": line} for name, file, line in WAITS], **more,
    }  # fmt: skip


def recorder(rank: int, version: str = "2.9") -> dict[str, Any]:
    entries = [entry(number, "1" if number % 3 == 0 else "0") for number in range(1, 9)]
    entries += [] if rank == 2 else [entry(9, state="started")]
    entries += [entry(10, profiling_name=f"nccl:send {rank}->0", is_p2p=True, p2p_seq_id=1, state="scheduled")]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}, "1": {"name": "1", "ranks": "[0, 2]"}}
    status = {"0": {"last_completed_collective": 8, "last_enqueued_collective": 9, "last_started_collective": 9}}
    return {"version": version, "pg_config": config, "pg_status": status, "entries": entries}


class Pickled:
    """A document that is written as a pickle."""

    def __init__(self, document: Any) -> None:
        self.document = document

    def dumped(self, document: Any) -> bytes:
        return pickle.dumps(document, protocol=2)


RECORDERS: tuple[Files, ...] = (
    {f"nccl_trace_rank_{rank}": Pickled(recorder(rank)) for rank in RANKS},
    {f"trace_rank_{rank}.json": recorder(rank) for rank in RANKS},
    {f"comm_lib_trace_rank_{rank}": Pickled({**recorder(rank, "2.10"), "comm_lib_version": "2.29"}) for rank in RANKS},
    {f"nccl_trace_rank_{rank}": Pickled(recorder(rank)["entries"]) for rank in RANKS},
)


def ras_rank(rank: int) -> dict[str, Any]:
    who = {"rank": rank, "host": f"n{rank // 2}", "pid": 4000 + rank, "cuda_dev": rank % 2}
    status = {"init_state": 0, "async_error": 0, "finalize_called": False}
    return {**who, "status": status, "collective_counts": {"AllReduce": 30 + (rank != 2), "Broadcast": 2}}


RAS = {
    "nccl_version": "2.28.9",
    "communicators": [
        {"hash": "0xa1", "secondary_hash": "0xb2", "size": 4, "ranks": [ras_rank(rank) for rank in (0, 1, 2)],
         "missing_ranks": [{**{key: ras_rank(3)[key] for key in ("rank", "host", "pid", "cuda_dev")},
                            "status": {"unresponsive": True, "considered_dead": False}}]},
        {"hash": "0xc3", "size": 2, "ranks": [ras_rank(0), ras_rank(2)], "missing_ranks": []},
    ],
}  # fmt: skip
RAS_TEXT = b"""
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 4105 on node n1 managing GPU 1

Warnings
========

#0-0 (a1b2c3d4e5f60718) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 31
  Rank 5 has launched up to operation 30 -- GPU 1 managed by process 4105 on node n1
  Communicator ranks have different status
  Rank 5 has status FINALIZE -- GPU 1 managed by process 4105 on node n1
"""


def inspector(place: int) -> bytes:
    lines = [
        {"header": {"id": "0xab", "rank": place, "n_ranks": 4, "nnodes": 1},
         "metadata": {"inspector_output_format_version": "v4.0", "hostname": "n0", "pid": 4000 + place},
         "coll_perf": {"coll": "AllReduce", "coll_sn": number, "coll_msg_size_bytes": 64, "coll_exec_time_us": 9}}
        for number in range(3, 9 if place == 2 else 10)
    ]  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


NCCL: tuple[Files, ...] = (
    {"ras.json": RAS},
    {"ras.txt": RAS_TEXT},
    {f"n0-pid{4000 + place}.log": inspector(place) for place in RANKS},
)


def bundles() -> list[Files]:
    """Two bundles of `bsl spy`, as documents."""
    found = []
    for name in ("disk-full", "collective-after-error"):
        folder = ROOT / "diagnostics" / "signatures" / name / "recording"
        files = [path for path in folder.rglob("*") if path.is_file()]
        found.append({str(path.relative_to(folder)): content_of(path) for path in files})
    return found


def content_of(path: Path) -> Any:
    """A file of the project: a document where it is JSON."""
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()


def texts_in(folder: str, pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / folder).glob(pattern))]


def examples(folder: str) -> list[bytes]:
    """The example lines of a table of words, one file of them for each file of the table."""
    marks = ("example = ", "    ")
    return [
        b"\n".join(line.split(b" = ", 1)[1] for line in text.splitlines() if line.startswith(marks[0].encode())) + b"\n"
        for text in texts_in(f"diagnostics/{folder}", "*.ini")
    ]


ELASTIC = {
    "message": {
        "message": "ValueError: vocab size 50257 is not divisible by 4",
        "extraInfo": {
            "py_callstack": 'Traceback (most recent call last):\n  File "t.py", line 1, in main\nValueError: 3\n',
            "timestamp": "1732672800",
        },
    }
}
SQUEUE = (
    b"12|RUNNING|me|debug|2|n[0-1]|None|2026-11-21T01:02:03|2026-11-21T01:09:03|1:00|N/A|train|bsl:/runs/demo\n"
    b"13_[1-4%2]|PENDING|me|debug|2||Priority|N/A|N/A|0:00|2026-11-21T01:02:03|train|(null)\n"
    b"14+0|COMPLETING|me|debug|2|n[0-1],login[01-03,7]|None|2026-11-21T01:02:03|N/A|1-02:03:04|N/A|t|(null)\n"
)
SCONTROL = (
    b"JobId=12 JobName=train UserId=me(0) JobState=FAILED StdErr=/tmp/a.err StdIn=/dev/null StdOut=/tmp/a.out Power=\n"
)
NODES = b"n0|idle|none\nn1|down*|Not responding [slurm@2026-11-21]\nn2|mixed+drain|a | b\n"
RESERVATION = (
    b"ReservationName=maint StartTime=2026-11-21T01:02:03 EndTime=2026-11-22T01:02:03 Nodes=n[0-3] Flags=MAINT,X\n"
)
NAMES: tuple[bytes, ...] = (
    *(b"tp=4,pp=12,dp=8", b"tp=2,cp=2,ep=2,pp=2,dp=2", b"dp=8", b"0-3,7,9-12", b"5", b"n[0-3,07-11]", b"a,b[1-2]-ib,c"),
    *(b"jean-zay-iam[48-95],x1000c[0-1]s[0-7]b0n[0-1]", b"12", b"12_5", b"12+1", b"12_[1-4%2]", b"1-02:03:04"),
)
