"""A launcher like torchrun, without torch: python launch_workers.py [one-session] [twice] PROGRAM ARGUMENTS

It starts NPROC_PER_NODE workers, each in a session of its own, and prints how each ends. When one fails, the others are
ended, and it exits with 1.
  one-session  workers stay in the session of the launcher, which signals each worker alone
  twice        after a failure, all are started once more
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

words = sys.argv[1:]
is_one_session = "one-session" in words[:2]
starts = 2 if "twice" in words[:2] else 1
program = [word for at, word in enumerate(words) if at > 1 or word not in ("one-session", "twice")]
each = int(os.environ["NPROC_PER_NODE"])
first = int(os.environ["NODE_RANK"]) * each


def start(local_rank: int) -> subprocess.Popen[bytes]:
    place = {"RANK": first + local_rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": each}
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    return subprocess.Popen([sys.executable, *program], env=environment, start_new_session=not is_one_session)


def end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate() if is_one_session else os.killpg(worker.pid, signal.SIGTERM)
    for worker in workers:
        worker.wait(20)


def run(workers: list[subprocess.Popen[bytes]]) -> bool:
    while any(worker.poll() is None for worker in workers):
        if any(worker.poll() not in (None, 0) for worker in workers):
            break
        time.sleep(0.02)
    codes = [worker.poll() for worker in workers]
    end(workers)
    print("first", codes, "then", [worker.returncode for worker in workers], flush=True)
    return not any(codes)


def stop(*_: object) -> None:
    raise SystemExit(143)


print("launching", os.environ.get("RANK"), os.environ["WORLD_SIZE"], os.environ["NNODES"], flush=True)
signal.signal(signal.SIGTERM, stop)
workers: list[subprocess.Popen[bytes]] = []
try:
    for _ in range(starts):
        workers = [start(local_rank) for local_rank in range(each)]
        if run(workers):
            sys.exit(0)
    sys.exit(1)
finally:
    end(workers)
