"""Tries one node in some seconds, and prints what it measured. Stand-alone, together with check_gpus.py and
check_peers.py: standard library only, Python 3.8 or newer; torch is used where there is a GPU.

    export BSL_CHECK_TOKEN="$(uuidgen)"
    srun --nodes=4 --ntasks-per-node=1 python -I check_node.py | python -I -S bsl-job.pyz check-verdict --nodes 'n0 n1'

srun starts one process per node. They know each other by the token, and count the strangers that call. Each prints
lines `@check {...}`: one when it starts, one when it ends. A test is `ok`, `failed`, or `not_tried`, and then it has
why. Nothing is judged here except what is wrong in itself: a wrong product, memory that returns something else, an
exchange that breaks. Whether a node is slow is seen next to the others.

The time is limited. A test of this node alone has failed if it has run for half of that time; one that began later,
such as after a slow start of torch, was not tried. Waiting for other nodes is not a failure of this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if "__file__" in globals():
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # -I leaves it out
sys.dont_write_bytecode = True

from check_gpus import has_gpu, try_gpus
from check_peers import try_peers

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Record = dict[str, Any]

SCHEMA_VERSION = 1
LIMIT_S = 60.0
SHARED_BYTES = 64 * 2**20
"""Loaders of data pass batches of about this size."""
MEMORY_BYTES = 64 * 2**20
SIZE = 96
"""Rows and columns of the product in plain Python: 0.1 s."""
REPEATS = 3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Try one node and print what it measured.")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time limit of all tests, in seconds")
    parser.add_argument(
        "--work", action="store_true", help="run only the workload that is timed, the same on every node"
    )
    parser.add_argument("--hosts", default="", help="all nodes in Slurm's order; default: from scontrol")
    options = parser.parse_args(arguments)
    node = Node(options.limit_s, options.hosts.split())
    if options.work:
        node.work()
    else:
        node.run()
    return 0


class Node:
    """The tests of one node, and what they have found so far."""

    def __init__(self, limit_s: float, hosts: list[str]) -> None:
        self.hosts = hosts
        self.name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.began = time.monotonic()
        self.limit_s = limit_s
        self.tests: list[Record] = []
        self.peers: list[Record] = []
        self.strangers = 0
        self.running: str | None = None
        self.running_since = self.began
        self.gpus: int | None = None
        self.lock = threading.Lock()

    def work(self) -> None:
        """Do everything that needs no other node."""
        for name, unit, test in (
            ("cpu", "Mflop/s", multiply),
            ("memory", "MiB/s", check_memory),
            ("shared memory", "MiB/s", check_shared_memory),
        ):
            self.try_one(name, unit, test)
        self.try_gpus()

    def run(self) -> None:
        self.say({"kind": "start"})
        threading.Thread(target=self.watch, daemon=True).start()
        self.work()
        self.running = "exchange"
        try:
            self.peers, self.strangers = try_peers(self.name, self.hosts, self.began + self.limit_s - 5)
            self.note("exchange", "ok" if self.peers else "not_tried", why="" if self.peers else "this node is alone")
        except (OSError, ValueError, KeyError) as error:
            self.note("exchange", "not_tried", why=f"{type(error).__name__}: {error}")
        self.end()

    def try_one(self, name: str, unit: str, test: Callable[[], float]) -> None:
        """Run a test that returns a rate, raises Broken if the node is bad, or another error if it cannot run."""
        self.running, self.running_since = name, time.monotonic()
        try:
            self.note(name, "ok", test(), unit)
        except Broken as error:
            self.note(name, "failed", why=str(error))
        except Exception as error:  # a test that cannot run is not held against the node
            self.note(name, "not_tried", why=f"{type(error).__name__}: {error}")
        self.running = None

    def try_gpus(self) -> None:
        if not has_gpu():
            self.note("gpu", "not_tried", why="this node shows no GPU device")
            return
        try:
            import torch
        except Exception as error:
            self.note("gpu", "not_tried", why=f"no torch: {error}")
            return
        self.gpus = torch.cuda.device_count()
        devices = [f"cuda:{index}" for index in range(self.gpus)]
        for name, unit, test in try_gpus(torch, devices, Broken):
            self.try_one(name, unit, test)

    def note(self, name: str, status: str, value: float | None = None, unit: str = "", why: str = "") -> None:
        self.tests.append({"name": name, "status": status, "value": value, "unit": unit, "why": why})

    def watch(self) -> None:
        """End this process when its time is up, and report which test was running: it may never return."""
        time.sleep(max(0.0, self.began + self.limit_s - time.monotonic()))
        running = self.running
        if running == "exchange":
            self.note("exchange", "not_tried", why=f"it did not end in {self.limit_s:g} s, perhaps due to other nodes")
        elif running is not None:
            ran_s = time.monotonic() - self.running_since
            if ran_s >= self.limit_s / 2:
                self.note(running, "failed", why=f"it did not end in {ran_s:.0f} s")
            else:
                self.note(running, "not_tried", why=f"it began only {ran_s:.0f} s before the time limit")
        self.end()
        os._exit(0)

    def end(self) -> None:
        with self.lock:
            self.running = None
            seconds = time.monotonic() - self.began
            found = {"tests": self.tests, "peers": self.peers, "strangers": self.strangers, "gpus": self.gpus}
            self.say({"kind": "result", **found, "seconds": seconds})
            if threading.current_thread() is threading.main_thread():
                os._exit(0)  # what hangs at exit must not hold the step

    def say(self, record: Record) -> None:
        os.write(1, f"@check {json.dumps({'schema_version': SCHEMA_VERSION, 'node': self.name, **record})}\n".encode())


class Broken(Exception):
    """What a node does wrong."""


def multiply() -> float:
    """Return the rate of a product of matrices in plain Python, in Mflop/s, the best of some."""
    left = [[(row * column + 1) % 7 for column in range(SIZE)] for row in range(SIZE)]
    columns = list(zip(*left))
    # The sum of a product is known without it.
    expected = sum(sum(column) * sum(row) for column, row in zip(columns, left))
    best = 0.0
    for _ in range(REPEATS):
        began = time.perf_counter()
        total = sum(sum(map(int.__mul__, row, column)) for row in left for column in columns)
        best = max(best, 2e-6 * SIZE**3 / (time.perf_counter() - began))
        if total != expected:
            raise Broken(f"the sum of a product is {total} instead of {expected}")
    return best


def check_memory() -> float:
    """Write a pattern to memory, read it back, and return the rate in MiB/s, the best of some."""
    block = bytes(range(256)) * 4096
    count = MEMORY_BYTES // len(block)
    memory = bytearray(MEMORY_BYTES)
    best = 0.0
    for _ in range(REPEATS):
        began = time.perf_counter()
        for index in range(count):
            memory[index * len(block) : (index + 1) * len(block)] = block
        wrong = [index for index in range(count) if memory[index * len(block) : (index + 1) * len(block)] != block]
        best = max(best, 2 * MEMORY_BYTES / 2**20 / (time.perf_counter() - began))
        if wrong:
            raise Broken(f"{len(wrong)} of {count} MiB of memory differ from what was written")
    return best


def check_shared_memory(folder: str = "/dev/shm") -> float:
    """Write a file into shared memory, read it back, and return the rate in MiB/s."""
    block = bytes(range(256)) * 4096
    began = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as stream:
        try:
            for _ in range(SHARED_BYTES // len(block)):
                stream.write(block)
            stream.flush()
        except OSError as error:
            what = f"{SHARED_BYTES >> 20} MiB cannot be written to {folder}"
            raise Broken(f"{what}: {error.strerror}{room(folder)}") from None
        finally:
            with contextlib.suppress(OSError):
                stream.seek(0)
        if any(stream.read(len(block)) != block for _ in range(SHARED_BYTES // len(block))):
            raise Broken(f"a file in {folder} does not read back as written")
    return 2 * SHARED_BYTES / 2**20 / (time.perf_counter() - began)


def room(folder: str) -> str:
    found = os.statvfs(folder)
    return f"; {found.f_bavail * found.f_frsize >> 10} KiB of {found.f_blocks * found.f_frsize >> 10} are free"


if __name__ == "__main__":
    sys.exit(main())
