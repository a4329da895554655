"""A rank in a collective that does not end: `python collectives.py DEVICE FOLDER MODE TIMEOUT_S CULPRIT`.

MODE is no_group (the culprit has joined the store and does not come to the group, which is formed as `bsl train` does),
no_collective (it is in the group and does not come to the first collective), watchdog (the collective is queued behind
a kernel that does not end) or killed (the ranks reduce until one is killed). All but killed are over NCCL on a GPU, and
over gloo on a CPU. There, the rank waits for the culprit, and does itself what NCCL's watchdog does.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from stage import DEVICE, LONG_S, MODE, RANK, say_ready, start_endless_kernel
from torch.distributed.rendezvous import rendezvous

from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.train.device.nccl import nccl_settings

TIMEOUT, CULPRIT = timedelta(seconds=float(sys.argv[4])), int(sys.argv[5])
BACKEND = "nccl" if DEVICE == "cuda" and MODE in ("no_group", "no_collective", "watchdog") else "gloo"
NUM_VALUES = 2**24 if DEVICE == "cuda" else 2**20


def this_attempt() -> AttemptDir:
    return RunDir(Path(os.environ["BSL_RUN_DIR"])).attempt(os.environ["BSL_ATTEMPT"])


def join_store() -> dist.Store:
    store, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    return store


def form_group(store: dist.Store, *, binds: bool = False) -> None:
    """Form the group; with `binds`, its NCCL communicator too."""
    if BACKEND == "nccl":
        os.environ.update(nccl_settings(this_attempt(), os.environ))
    dist.init_process_group(
        BACKEND,
        store=dist.PrefixStore("default_pg", store),
        rank=RANK,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=TIMEOUT,
        device_id=torch.device("cuda", 0) if binds and BACKEND == "nccl" else None,
    )


def prepare_alone() -> None:
    say_ready()
    time.sleep(LONG_S)


def reduce_gradients(values: torch.Tensor, *, is_async: bool = False) -> dist.Work | None:
    """Reduce, and wait for the result on the host; with `is_async`, return what to wait for."""
    work = dist.all_reduce(values, dist.ReduceOp.MAX, async_op=is_async)
    if not is_async:
        values[0].item()
    return work


def no_group() -> None:
    store = join_store()
    if RANK == CULPRIT:
        prepare_alone()
    torch.ones(1, device=DEVICE)  # the device is in use before
    say_ready()
    form_group(store, binds=True)


def no_collective() -> None:
    form_group(join_store())
    if RANK == CULPRIT:
        prepare_alone()
    values = torch.ones(1, device=DEVICE)
    say_ready()
    reduce_gradients(values)


def watchdog() -> None:
    form_group(join_store())
    values = torch.ones(1, device=DEVICE)
    reduce_gradients(values)
    if DEVICE == "cuda":
        start_endless_kernel()
        say_ready()
        reduce_gradients(values)
    else:
        play_the_watchdog(values)


def play_the_watchdog(values: torch.Tensor) -> None:
    """Do as NCCL's watchdog: write what torch has recorded while the collective is open, and abort at its time-out."""
    if RANK == CULPRIT:
        prepare_alone()
    say_ready()
    work = reduce_gradients(values, is_async=True)
    assert work is not None
    Path(f"{this_attempt().recorder_dumps}{RANK}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    try:
        work.wait()
    except RuntimeError as error:
        print(f"RuntimeError: {error}", flush=True)
        os.abort()


def killed() -> None:
    form_group(join_store())
    values = torch.ones(NUM_VALUES, device=DEVICE)
    for _ in range(3):
        reduce_gradients(values)
    say_ready()
    while True:
        reduce_gradients(values)


if __name__ == "__main__":
    {"no_group": no_group, "no_collective": no_collective, "watchdog": watchdog, "killed": killed}[MODE]()
