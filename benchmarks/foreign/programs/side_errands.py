"""A DDP training in which one rank has something to do between two steps, and never comes back from it.

python -m torch.distributed.run --nproc-per-node 4 side_errands.py ERRAND CULPRIT

`vocabulary`  lets `sort` read a word list, which is a named pipe that nobody writes
`settings`    asks a server (silent_server.py) for new settings, without a timeout
`upload`      uploads by asyncio through a thread pool of one, whose task waits for another task of the same pool
`preempted`   waits for a signal that tells it to go on
`writer`      waits for a child, forked to write a checkpoint while a thread held a lock
`prefetch`    waits for a batch of a thread that has died of an exception
"""

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from diary import note
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def vocabulary():
    os.mkfifo("words.txt")
    return subprocess.run(["sort", "-u", "words.txt"], capture_output=True, check=True).stdout


def settings():
    port = Path("server-port").read_text()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/settings?after=4") as answer:
        return answer.read()


def upload():
    pool = ThreadPoolExecutor(1)

    def whole():
        return pool.submit(len, b"part").result()

    async def send():
        return await asyncio.get_running_loop().run_in_executor(pool, whole)

    return asyncio.run(send())


def preempted():
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pause()


def writer():
    lock, held = threading.Lock(), threading.Event()

    def gather_statistics():
        with lock:
            held.set()
            time.sleep(2)

    threading.Thread(target=gather_statistics, daemon=True).start()
    held.wait()
    child = os.fork()
    if child == 0:
        with lock:
            torch.save({"step": 4}, "checkpoint.pt")
        os._exit(0)
    os.waitpid(child, 0)


def prefetch():
    batches = queue.Queue(2)

    def fill():
        for number in range(5):
            batches.put({"rows": torch.full((4,), number)})
            {"images": 1}["rows"]

    threading.Thread(target=fill, daemon=True).start()
    return [batches.get() for _ in range(5)]


ERRANDS = {each.__name__: each for each in (vocabulary, settings, upload, preempted, writer, prefetch)}


def main():
    errand, culprit = ERRANDS[sys.argv[1]], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(100_000):
        if step == 5 and rank == culprit:
            note("struck", rank)
            errand()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            best = [float(step)]
            dist.broadcast_object_list(best, src=0)
        time.sleep(0.1)
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
