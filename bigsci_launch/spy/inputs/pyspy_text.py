"""Reads the text that `py-spy dump` prints, for any number of processes one after the other.

    Process 835990: python -u pretrain_gpt.py --local_rank=3
    Python v3.8.8 (/usr/bin/python3.8)

    Thread 835990 (active): "MainThread"
        train (megatron/training.py:915)

An excerpt without `Process` lines works too: each main thread starts a process, whose pid is the thread's number. The
format is that of py-spy 0.3 to 0.4: `--locals` prints values at a deeper indent, `--native` adds frames without a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigsci_launch.spy.inputs.looks import named_rank, node_of
from bigsci_launch.spy.inputs.reading import Found, NotThis, Reading

PROCESS = re.compile(r"^Process (\d+): ?(.*)$")
THREAD = re.compile(r'^Thread (0x[0-9A-Fa-f]+|\d+) \(([^)]*)\)(?:: "(.*)")?\s*$')
FRAME = re.compile(r"^ {4}(\S.*?) \((.+?)(?::(\d+))?\)$")
ERROR = re.compile(r"^Error: (.*)$")
LOCAL_RANK = re.compile(r"--local[_-]rank[= ](\d+)")
LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run", "torchrun", "deepspeed.launcher")
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
WORKER_FILE = "torch/utils/data/_utils/worker.py"


@dataclass
class _Process:
    """What has been read about one process so far."""

    pid: int | None
    command: str
    threads: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_rank(self) -> bool:
        """Whether it looks like a rank and not like a launcher, a helper or a data-loader worker."""
        if any(name in self.command for name in LAUNCHERS + HELPERS):
            return False
        return not any(frame["file"].endswith(WORKER_FILE) for thread in self.threads for frame in thread["frames"])

    @property
    def local_rank(self) -> int | None:
        found = LOCAL_RANK.search(self.command)
        return int(found[1]) if found else None


def read_pyspy_text(path: Path, data: bytes) -> Found:
    """Read the processes in a text of py-spy.

    Raises:
        NotThis: it contains no thread in py-spy's format.
    """
    text = data.decode("utf-8", "replace")
    if "\nThread " not in f"\n{text}":
        raise NotThis
    processes = [process for process in split_processes(text.splitlines()) if process.threads]
    if not any(thread["frames"] for process in processes for thread in process.threads):
        raise NotThis
    node = node_of(path)
    ranks = [process for process in processes if process.is_rank]
    rank = named_rank(path) if len({process.pid for process in ranks}) == 1 else None
    readings = [
        Reading("py-spy text", node, rank, each.local_rank, each.pid, each.threads, command=each.command)
        for each in ranks
    ]
    problems = [f"py-spy: {words[1]}" for line in text.splitlines() if (words := ERROR.match(line))]
    return Found(tuple(readings), tuple(problems))


def split_processes(lines: list[str]) -> Iterator[_Process]:
    """Yield the processes in their order."""
    process, has_headers = _Process(None, ""), any(PROCESS.match(line) for line in lines)
    for line in lines:
        if words := PROCESS.match(line):
            yield process
            process = _Process(int(words[1]), words[2])
        elif words := THREAD.match(line):
            is_main = words[3] == "MainThread"
            if is_main and process.threads and not has_headers:
                yield process
                process = _Process(None, "")
            process.threads.append(new_thread(words[1], words[2], words[3]))
            if is_main and process.pid is None and words[1].isdigit():
                process.pid = int(words[1])
        elif (words := FRAME.match(line)) and process.threads and words[3]:
            frame = {"function": words[1], "file": words[2], "line": int(words[3])}
            process.threads[-1]["frames"].append(frame)
    yield process


def new_thread(number: str, state: str, name: str | None) -> dict[str, Any]:
    """Return a thread without frames. `state` is py-spy's: active or idle, and whether the thread holds the GIL."""
    return {
        "tid": int(number, 0),
        "name": name,
        "active": "active" in state,
        "owns_gil": "gil" in state,
        "frames": [],
    }
