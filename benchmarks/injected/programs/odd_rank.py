"""A rank that ends in an unusual way: python odd_rank.py BEHAVIOUR [WORD] ... Prints `iteration N` every 0.2 s.

daemon CODE        rank 1 leaves a process that holds its output for two minutes; rank 1 ends with CODE, others with 0
thread [CODE]      a thread of rank 1 dies of a lost connection; all end with 0, or rank 3 ends with CODE
bytes              rank 2 prints a progress bar, colours and bytes that are not UTF-8, and ends with -1
slow-death         rank 5 has no memory left, and takes 4 s to end; the others lose its connection and end at once
teardown           all make their last step; then rank 1 dies of SIGSEGV
import FOLDER      import a module that is in FOLDER, then run for ever
save FOLDER FLAG   once FLAG exists, rank 2 writes a checkpoint into FOLDER
polite             end with 0 at the next step after a SIGTERM
resume             a run that is started again: stops at step 4, then at step 8 each time
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from itertools import count
from pathlib import Path

rank = int(os.environ["RANK"])
LAST_RANK = int(os.environ["WORLD_SIZE"]) - 1
RESET = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.6]:40213"
BAR = "\r loading shards:  {0:2d}%|###       | {0}/100 [00:0{1}<00:09]"
MEGATRON = (
    " iteration {:8d}/     100 | consumed samples: {:12d} | elapsed time per iteration (ms): 200.0 | learning rate: "
    "1.000E-04 | global batch size:     2 | lm loss: 2.345678E+00 | loss scale: 1.0 | grad norm: 1.234 | number of "
    "skipped iterations:   0 | number of nan iterations:   0 |"
)


def steps(last: int = 10**9) -> None:
    for number in range(last):
        time.sleep(0.2)
        print("iteration", number, flush=True)


def daemon(code: str) -> None:
    steps(3)
    if rank == 1 and os.fork() == 0:
        os.setsid()
        time.sleep(120)
        os._exit(0)
    steps(3)
    if rank == 1:
        sys.exit(int(code))
    if code != "0":
        steps()


def upload() -> None:
    raise ConnectionResetError(104, "Connection reset by peer")


def thread(code: str = "0") -> None:
    steps(2)
    if rank == 1:
        threading.Thread(target=upload, name="metrics").start()
    steps(8)
    if rank == 3:
        sys.exit(int(code))
    if code != "0":
        steps()


def odd_bytes() -> None:
    steps(3)
    if rank == 2:
        for number in range(0, 45, 5):
            sys.stderr.write(BAR.format(number, number // 10))
        sys.stderr.flush()
        os.write(2, b"\r\x1b[A\x1b[2K\x1b[1;31mValueError: bad shard\x1b[0m \xff\xfe caf\xe9 \x00 \xe2\x82\r\n")
        sys.exit(-1)
    steps()


def slow_death() -> None:
    steps(4)
    if rank == 5:
        atexit.register(time.sleep, 4)
        raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB")
    time.sleep(1)
    print(RESET, flush=True)
    os._exit(1)


def teardown() -> None:
    steps(4)
    print("training is done", flush=True)
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGSEGV)


def import_from(folder: str) -> None:
    sys.path.insert(0, folder)
    import house_of_tokens  # type: ignore[import-not-found]

    print(house_of_tokens.__name__, flush=True)
    steps()


def save(folder: str, flag: str) -> None:
    for number in count():
        time.sleep(0.2)
        print("iteration", number, flush=True)
        if rank == 2 and Path(flag).exists():
            Path(folder, "iter_0000100.pt").write_bytes(bytes(1000))
            Path(flag).unlink()


def polite() -> None:
    is_asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_asked.set())
    for number in count():
        time.sleep(0.2)
        print("iteration", number, flush=True)
        if is_asked.is_set():
            print("asked to end: leaving", flush=True)
            sys.exit(0)


def resume() -> None:
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    first, last, culprit = (1, 4, 1) if restarts == 0 else (5, 8, 2)
    for number in range(first, last + 1):
        time.sleep(0.5)
        if rank == LAST_RANK:
            print(MEGATRON.format(number, 2 * number), flush=True)
    time.sleep(0.5)
    if rank == culprit:
        raise ValueError("NaN in gradients" if restarts else "a shard is empty")
    time.sleep(600)


BEHAVIOURS = {
    "daemon": daemon,
    "thread": thread,
    "bytes": odd_bytes,
    "slow-death": slow_death,
    "teardown": teardown,
    "import": import_from,
    "save": save,
    "polite": polite,
    "resume": resume,
}
BEHAVIOURS[sys.argv[1]](*sys.argv[2:])
