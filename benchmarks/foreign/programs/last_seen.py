"""Ranks that end while the others need them.

last_seen.py WAY CULPRIT [--wait HOW]

`killed` `leaves` `returns` `segfaults` `raises` `aborts` `lingers` say how the culprit ends; `none`: nobody does.
--wait says how the others wait: `reduce`, `store` (for a key), `handler` (they sleep after the error), `finally`.
"""

import argparse
import ctypes
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from diary import note


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves():
    os._exit(0)


def returns():
    sys.exit(0)


def segfaults():
    ctypes.string_at(0)


def raises():
    raise RuntimeError("the loss is not a number")


def aborts():
    print("[rank] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=44)", flush=True)
    os.abort()


def lingers():
    threading.Thread(target=time.sleep, args=(9999,), name="metrics").start()
    raises()


def none():
    pass


WAYS = {each.__name__: each for each in (killed, leaves, returns, segfaults, raises, aborts, lingers, none)}


def wait(how, store, step):
    if how == "store":
        store.get(f"done/{step}")
    dist.all_reduce(torch.ones(8))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("culprit", type=int)
    parser.add_argument("--wait", default="reduce")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    note("hello", rank)
    step = 0
    try:
        while options.way != "none" or step < options.steps:
            if step == options.steps and rank == options.culprit:
                note("struck", rank)
                WAYS[options.way]()
            if rank == options.culprit:
                store.set(f"done/{step}", "yes")
            wait(options.wait, store, step)
            note(f"step {step}", rank)
            time.sleep(0.1)
            step += 1
    except Exception as error:
        if rank == options.culprit or options.wait != "handler":
            raise
        print(f"peer lost: {error}; holding for the debugger", flush=True)
        time.sleep(9999)
    finally:
        if options.wait == "finally" and rank != options.culprit:
            store.get("all-saved")


if __name__ == "__main__":
    main()
