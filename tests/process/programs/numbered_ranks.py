"""Ranks that get their numbers in one of the ways of the world, and hang: `python numbered_ranks.py WAY FOLDER [..]`.

Each rank writes its process number into FOLDER/rank-N, and each data loader's worker into FOLDER/worker-PID.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

SIZE = 3
WAY, FOLDER = sys.argv[1], Path(sys.argv[2])
FAR = timedelta(seconds=300)


def report(rank: int) -> None:
    """Say who is who, in a file that appears all at once."""
    new = FOLDER / f"new-{os.getpid()}"
    new.write_text(str(os.getpid()))
    new.rename(FOLDER / f"rank-{rank}")


def hang(rank: int) -> None:
    report(rank)
    time.sleep(900)


def train(index: int, folder: str) -> None:
    """What torch's spawn calls in each rank."""
    signal.alarm(120)
    hang(index)


def train_with_variable(index: int, folder: str) -> None:
    """The number of the rank is neither in its arguments nor in the environment that it began with."""
    signal.alarm(120)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(index), str(SIZE)
    hang(index)


def spawn(method: str, function=train) -> None:
    import torch.multiprocessing as mp

    mp.start_processes(function, args=(str(FOLDER),), nprocs=SIZE, start_method=method)


def start_with_variables() -> None:
    """Start ranks with Python's own multiprocessing; each sets RANK itself."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train_with_variable, args=(index, str(FOLDER))) for index in range(SIZE)]
    for rank in reversed(ranks):
        rank.start()
    for rank in ranks:
        rank.join()


def read_arguments() -> None:
    hang(int(sys.argv[sys.argv.index("--rank") + 1]))


def read_nothing() -> None:
    """A number that merely looks like a rank."""
    hang(int(sys.argv[3]))


def read_file() -> None:
    """Join a group as a file says, and stay in a barrier that rank 1 does not reach."""
    import torch.distributed as dist

    torch_settings = json.loads(Path(sys.argv[3]).read_text())
    join(dist, torch_settings["rank"], torch_settings["world_size"], torch_settings["port"])


def join(dist, rank: int, world_size: int, port: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=FAR
    )
    report(rank)
    if rank != 1:
        dist.barrier()
    time.sleep(900)


def wait_in_the_store() -> None:
    """Wait for ranks that never join: every number is only an argument of init_process_group."""
    import torch.distributed as dist

    settings = json.loads(Path(sys.argv[3]).read_text())
    report(settings["rank"])
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{settings['port']}",
        rank=settings["rank"],
        world_size=settings["world_size"] + 1,
        timeout=FAR,
    )


class Batches:
    """A data set whose batches never come."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        (FOLDER / f"worker-{os.getpid()}").touch()
        time.sleep(900)
        return index


def load() -> None:
    """Read data with workers, which inherit RANK."""
    from torch.utils.data import DataLoader

    report(int(os.environ["RANK"]))
    next(iter(DataLoader(Batches(), num_workers=2)))


def read_environment() -> None:
    hang(int(os.environ["RANK"]))


if __name__ == "__main__":
    signal.alarm(120)
    {
        "spawn": lambda: spawn("spawn"),
        "fork": lambda: spawn("fork"),
        "variables": start_with_variables,
        "arguments": read_arguments,
        "nothing": read_nothing,
        "file": read_file,
        "store": wait_in_the_store,
        "load": load,
        "environment": read_environment,
    }[WAY]()
