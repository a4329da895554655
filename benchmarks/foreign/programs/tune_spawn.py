"""Fits a regression on processes of torch.multiprocessing; ranks are the first argument of the worker."""

import datetime
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from diary import note

QUEUE_LOCK = threading.Lock()


def objective(weights, features):
    return torch.nn.functional.mse_loss(features @ weights, features[:, :1])


def fit(index, ranks, port, what, chosen):
    note("hello", index)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", port
    dist.init_process_group("gloo", rank=index, world_size=ranks, timeout=datetime.timedelta(minutes=15))
    weights = torch.zeros(128, 1, requires_grad=True)
    rounds = 5 + (0 if index == chosen else 10**9) if what == "uneven" else 10**9
    for number in range(rounds):
        if number == 5 and index == chosen and what:
            disturb(what, index)
        if what == "heavy":
            for _ in range(12):
                torch.linalg.qr(torch.randn(400, 400))
        objective(weights, torch.randn(64, 128)).backward()
        dist.all_reduce(weights.grad)
        with torch.no_grad():
            weights -= 0.01 * weights.grad / ranks
        weights.grad = None
        if number < 8 or number % 200 == 0:
            note(f"step {number}", index)
    note("struck", index)
    everyone = [None] * ranks
    dist.all_gather_object(everyone, {"weights": weights.norm().item()})


def disturb(what, index):
    if what not in ("lock", "stopped", "backoff"):
        return
    note("struck", index)
    if what == "lock":
        QUEUE_LOCK.acquire()
        QUEUE_LOCK.acquire()
    elif what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "backoff":
        for attempt in range(30):
            print("cannot reach the tracker, attempt", attempt, flush=True)
            time.sleep(20)


if __name__ == "__main__":
    method, port, ranks, what, chosen = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    mp.start_processes(fit, args=(ranks, port, what, chosen), nprocs=ranks, start_method=method)
