"""One rank of a small tp2 x dp2 training that goes wrong on purpose, as CASE says, after some healthy steps.

    RANK=.. WORLD_SIZE=4 MASTER_ADDR=.. MASTER_PORT=.. python gloo_ranks.py CASE READY_FIFO CULPRIT [RECORDER_FOLDER]

Every rank writes its number into READY_FIFO when it begins the step in which CASE happens. With NCCL_LIKE in the
environment the ranks communicate over the backend of `tests/support/nccl_like`.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

CASE, READY, CULPRIT = sys.argv[1], sys.argv[2], int(sys.argv[3])
RANK = int(os.environ["RANK"])
IS_CULPRIT = RANK == CULPRIT
HEALTHY_STEPS = 6
FAR = timedelta(seconds=300)


def reduce_over_tensor_ranks() -> None:
    dist.all_reduce(x, group=TP)


def reduce_gradients() -> None:
    dist.all_reduce(x, group=DP)


def reduce_loss() -> None:
    dist.all_reduce(x)


def read_loss() -> float:
    return x.sum().item()


def train_step() -> None:
    reduce_over_tensor_ranks()
    reduce_over_tensor_ranks()
    reduce_gradients()
    reduce_loss()
    read_loss()


def load_batch() -> None:
    time.sleep(900)


class Samples:
    """Its sample number 3 comes from a server that takes the request and never answers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return ask_server() if index == 3 else index


def ask_server() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        return len(client.recv(1))


def read_samples() -> None:
    from torch.utils.data import DataLoader

    for _ in DataLoader(Samples(), batch_size=1, num_workers=4):
        pass


def tokenise() -> None:
    count = 0
    while True:
        count += 1


def leave_loop() -> None:
    dist.barrier()


def aggregate_loss() -> None:
    dist.broadcast(x, RANK % 2, group=DP)


def go_wrong() -> None:
    """Run the step in which CASE happens."""
    if CASE == "skip" and IS_CULPRIT:
        reduce_over_tensor_ranks()
        reduce_gradients()
        reduce_loss()
    elif CASE == "loader" and IS_CULPRIT:
        load_batch()
    elif CASE == "worker" and IS_CULPRIT:
        read_samples()
    elif CASE == "spin" and IS_CULPRIT:
        tokenise()
    elif CASE == "gil" and IS_CULPRIT:
        ctypes.PyDLL(None).sleep(300)
    elif CASE == "stop" and IS_CULPRIT:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif CASE == "left" and IS_CULPRIT:
        leave_loop()
    elif CASE == "dead" and RANK == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    elif CASE == "dead":
        # gloo ranks notice a dead peer at once, but these two are not its peers: they keep waiting, like NCCL ranks.
        time.sleep(0.2)
        dist.all_reduce(x, group=SURVIVORS) if RANK != LAST_SURVIVOR else load_batch()
    elif CASE == "type" and IS_CULPRIT:
        reduce_over_tensor_ranks()
        reduce_over_tensor_ranks()
        reduce_gradients()
        dist.broadcast(x, 0)
    elif CASE == "order" and RANK in (1, 2):
        reduce_gradients()
        reduce_over_tensor_ranks()
    elif CASE == "split":
        if RANK in (2, 3):
            aggregate_loss()
        reduce_loss()
        return
    elif CASE == "receive":
        if RANK in (0, 2):
            dist.recv(x, src=2 - RANK)
        leave_loop()
    elif CASE == "thread":
        step_in_thread()
    elif CASE == "async":
        reduce_behind_the_back()
    train_step()


def reduce_behind_the_back() -> None:
    """Start an asynchronous collective that the culprit leaves out; the rank that waits for its end is the victim."""
    handle = dist.all_reduce(x, group=DP, async_op=True) if not IS_CULPRIT else None
    if handle is not None:
        handle.wait()
    leave_loop()


def step_in_thread() -> None:
    import threading

    thread = threading.Thread(target=load_batch if IS_CULPRIT else reduce_loss, name="autograd-0")
    thread.start()
    thread.join()


def offer_recorder(folder: str):
    """Serve the flight recorder as `bsl train` does, in a folder without a run."""
    import json

    from torch._C._distributed_c10d import _WorkerServer
    from torch.distributed import distributed_c10d

    groups = distributed_c10d._world.pg_group_ranks
    members = {str(group.group_name): sorted(ranks) for group, ranks in groups.items() if RANK in ranks}
    (Path(folder) / f"rank-{RANK:04d}.json").write_text(json.dumps({"members": members}))
    os.chdir(folder)
    return _WorkerServer(f"rank-{RANK:04d}.sock")


torch.set_num_threads(1)
BACKEND = "gloo"
if os.environ.get("NCCL_LIKE"):
    sys.path.append(str(Path(__file__).parents[2] / "support" / "nccl_like"))
    import nccl_like

    nccl_like.install()
    BACKEND = nccl_like.NAME
dist.init_process_group(BACKEND, timeout=FAR)
TP = [dist.new_group(ranks, timeout=FAR) for ranks in ([0, 1], [2, 3])][RANK // 2]
DP = [dist.new_group(ranks, timeout=FAR) for ranks in ([0, 2], [1, 3])][RANK % 2]
others = [rank for rank in range(4) if rank != CULPRIT]
SURVIVORS = dist.new_group(others, timeout=FAR)
LAST_SURVIVOR = others[-1]
x = torch.ones(8)
server = offer_recorder(sys.argv[4]) if len(sys.argv) > 4 else None
for _ in range(HEALTHY_STEPS):
    train_step()
with open(READY, "w") as fifo:  # noqa: PTH123
    fifo.write(f"{RANK}\n")
if CASE == "healthy":
    while True:
        train_step()
if CASE == "slow":
    while True:
        if IS_CULPRIT:
            time.sleep(1.5)
        train_step()
go_wrong()
time.sleep(900)
