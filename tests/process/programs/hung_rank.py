"""A process that hangs in a known function: `python hung_rank.py PLACE READY_FIFO`."""

import os
import signal
import subprocess
import sys
import time


def wait_for_peers() -> None:
    time.sleep(300)


def load_batch() -> None:
    time.sleep(300)


def tokenise() -> None:
    while True:
        pass


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def read_shard() -> None:
    """Sleeps uninterruptibly: posix_spawn suspends the caller until its child runs, and that waits for a writer."""
    os.mkfifo(f"{READY}.never")
    opening = (os.POSIX_SPAWN_OPEN, 0, f"{READY}.never", os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[opening])


def wait_for_worker() -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    worker.wait()


READY = sys.argv[2]
signal.alarm(120)
with open(READY, "w") as fifo:  # noqa: PTH123
    fifo.write("ready\n")
globals()[sys.argv[1]]()
time.sleep(300)
