"""A DDP training in which one rank has something to do between two batches, and never comes back from it.

between_batches.py ERRAND CULPRIT [--rank R --world-size N --url URL]

`records`   writes log records to a bounded queue; the thread that empties it has died of a faulty handler
`converter` reads the output of a child line by line; the child is stuck in its full error pipe
`pool`      gives work to a pool, forked while a thread held the lock that the work needs
`drain`     waits until a queue has been worked off; the worker forgot to count one item
`gauge`     opens a named pipe for its metrics, which nobody reads
`debugger`  waits for a debugger to connect
`pattern`   matches a regular expression that backtracks for ever
`joins`     joins a process before it has read what that process puts into a queue
`answers`   awaits an event in asyncio, while another task of the loop beats once a second
`leaves`    finishes early; its interpreter waits at its exit for a child that waits for more work
`baton`     every rank: waits for a lock file in the build folder, left by a build that was killed
"""

import argparse
import asyncio
import logging
import logging.handlers
import multiprocessing
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diary import note
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.file_baton import FileBaton

FORK = multiprocessing.get_context("fork")
TALKATIVE = "import sys\nfor n in range(50000): print(n, 'skipped', file=sys.stderr)\nprint('converted')"


class Patient(logging.handlers.QueueHandler):
    def enqueue(self, record):
        self.queue.put(record)


class ByHost(logging.StreamHandler):
    def handle(self, record):
        return {"node": 1}[record.name]


def records():
    log = logging.getLogger("training")
    log.setLevel(logging.INFO)
    waiting = queue.Queue(20)
    log.addHandler(Patient(waiting))
    logging.handlers.QueueListener(waiting, ByHost()).start()
    for number in range(100):
        log.info("sample %d is long", number)


def converter():
    with subprocess.Popen([sys.executable, "-c", TALKATIVE], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        return [line for line in child.stdout]


VOCABULARY_LOCK = threading.Lock()


def encode(text):
    with VOCABULARY_LOCK:
        return [ord(letter) for letter in text]


def refresh_vocabulary(began):
    with VOCABULARY_LOCK:
        began.set()
        time.sleep(3)


def pool():
    began = threading.Event()
    threading.Thread(target=refresh_vocabulary, args=(began,), daemon=True).start()
    began.wait()
    with FORK.Pool(2) as workers:
        return workers.map(encode, ["some", "words", "of", "text"])


def drain():
    samples = queue.Queue()

    def clean():
        while True:
            sample = samples.get()
            if sample == 7:
                continue
            samples.task_done()

    threading.Thread(target=clean, daemon=True).start()
    for sample in range(10):
        samples.put(sample)
    samples.join()


def gauge():
    os.mkfifo("gauge")
    with open("gauge", "w") as metrics:
        metrics.write("loss 0.5\n")


def debugger():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.accept()


def pattern():
    return re.match(r"(\w+)+:", "w" * 60)


def tokenise(out):
    out.put(b"t" * 20_000_000)


def joins():
    out = FORK.Queue()
    child = FORK.Process(target=tokenise, args=(out,))
    child.start()
    child.join()
    return out.get()


async def beat():
    while True:
        await asyncio.sleep(1)


async def wait_for_answer():
    heart = asyncio.create_task(beat())
    await asyncio.Event().wait()
    heart.cancel()


def answers():
    asyncio.run(wait_for_answer())


def leaves():
    more = FORK.Queue()
    FORK.Process(target=more.get).start()
    sys.exit(0)


def baton():
    Path("lock").touch()
    lock = FileBaton("lock")
    if not lock.try_acquire():
        lock.wait()


ERRANDS = {
    each.__name__: each
    for each in (records, converter, pool, drain, gauge, debugger, pattern, joins, answers, leaves, baton)
}


def connect():
    parser = argparse.ArgumentParser()
    parser.add_argument("errand", choices=ERRANDS)
    parser.add_argument("culprit", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--url")
    options = parser.parse_args()
    if options.rank is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=options.url, rank=options.rank, world_size=options.world_size)
    return options, dist.get_rank()


def main():
    options, rank = connect()
    note("hello", rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 48), nn.SiLU(), nn.Linear(48, 24)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(100_000):
        if step == 5 and (rank == options.culprit or options.errand == "baton"):
            note("struck", rank)
            ERRANDS[options.errand]()
        batch = torch.randn(8, 24)
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
