"""Ranks that do not come to the next collective, for a reason of their own.

kept_waiting.py WAY CULPRITS

`file`       polls for a file that is never written
`newer`      polls until a file is newer than it was
`lock`       holds a file lock and waits in a barrier for those that want it
`locked`     wants a file lock that a process of its own holds which has been forgotten
`build`      waits for the lock of a build that was killed; the others wait for it
`handler`    handles a signal, and wants the lock that the interrupted code holds
`server`     waits for the answer of a server
`tool`       waits, in a thread, for a tool that waits for its standard input
`imports`    imports a module while a thread that imports it waits for the main thread
`both`       of two culprits the first polls for a file, the second waits for a server
"""

import argparse
import concurrent.futures
import http.client
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diary import note
from filelock import FileLock
from torch.utils.file_baton import FileBaton


def file(rank):
    while not Path("mount/ready").exists():
        time.sleep(1.5)


def newer(rank):
    seen = Path("weights.pt")
    seen.touch()
    before = seen.stat().st_mtime
    while seen.stat().st_mtime <= before:
        time.sleep(0.5)


def lock(rank, is_wrong=True):
    if is_wrong:
        with FileLock("cache.lock"):
            dist.barrier()
    else:
        time.sleep(1)
        with FileLock("cache.lock"):
            pass
        dist.barrier()


def locked(rank):
    subprocess.Popen(
        [sys.executable, "-c", "import fcntl, time\nf = open('index.lock', 'w')\nfcntl.flock(f, 2)\ntime.sleep(9999)"]
    )
    time.sleep(1.5)
    with FileLock("index.lock"):
        pass


def build(rank):
    Path("lock").touch()
    FileBaton("lock").wait()


STATE_LOCK = threading.Lock()


def on_signal(*_):
    with STATE_LOCK:
        return "saved"


def handler(rank):
    signal.signal(signal.SIGUSR1, on_signal)
    with STATE_LOCK:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)


def server(rank):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = http.client.HTTPConnection("127.0.0.1", silent.getsockname()[1])
        connection.request("POST", "/update_weights")
        connection.getresponse()


def run_tool():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    return child.wait()


def tool(rank):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(run_tool).result()


def imports(rank):
    module = Path(f"fused_{rank}.py")
    module.write_text("import threading\nthreading.main_thread().join()\n")
    sys.path.insert(0, os.getcwd())
    threading.Thread(target=importlib.import_module, args=(module.stem,), name="warm-up", daemon=True).start()
    time.sleep(0.5)
    importlib.import_module(module.stem)


def both(rank, is_first=True):
    file(rank) if is_first else server(rank)


WAYS = {each.__name__: each for each in (file, newer, lock, locked, build, handler, server, tool, imports, both)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("culprits")
    options = parser.parse_args()
    culprits = [int(rank) for rank in options.culprits.split(",")]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    for step in range(100_000):
        if step == 8:
            if rank in culprits:
                note("struck", rank)
            if options.way == "lock":
                lock(rank, rank in culprits)
            elif options.way == "both" and rank in culprits:
                both(rank, rank == culprits[0])
            elif rank in culprits:
                WAYS[options.way](rank)
        dist.all_reduce(torch.ones(16))
        time.sleep(0.1)


if __name__ == "__main__":
    main()
