"""A small classifier with gradients that are averaged by hand, for launchers of one's own.

The rank is --rank, else RANK or SLURM_PROCID; the size of the world is --world, else WORLD_SIZE or SLURM_NTASKS.
"""

import argparse
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from diary import note


def from_environment(*names):
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def average_gradients(model, world):
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    start = 0
    for parameter in model.parameters():
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter) / world
        start += parameter.numel()


def start_tracker():
    """A helper like those of experiment trackers: a Python child with the environment of its rank."""
    return subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.5)"])


def start_monitor():
    return subprocess.Popen(["sleep", "100000"])


def own_again():
    """Start again with a larger allocator arena, as some launch scripts do."""
    os.environ["MALLOC_ARENA_MAX"] = "2"
    os.execv(sys.executable, [sys.executable, *sys.argv])


def download_shard(seconds):
    mirror = "import socket,sys,time\ns=socket.socket(fileno=0)\nwhile True: s.sendall(bytes(40000)); time.sleep(0.5)"
    ours, theirs = socket.socketpair()
    subprocess.Popen([sys.executable, "-c", mirror], stdin=theirs.fileno())
    theirs.close()
    end = time.monotonic() + seconds
    with open("shard.bin", "wb") as file:
        while time.monotonic() < end:
            file.write(ours.recv(8192))


def read_metadata(rank):
    server = socket.create_server(("127.0.0.1", 0))
    line = socket.create_connection(server.getsockname())
    return line.recv(1000)


def tidy_cache():
    here = threading.Lock()
    with here, here:
        return


def wait_for_cache_lock():
    """The lock of the cache is held by a cleaner that went to sleep."""
    cleaner = "import fcntl,time; f=open('cache.lock','w'); fcntl.flock(f, 2); open('held','w'); time.sleep(1e6)"
    subprocess.Popen([sys.executable, "-c", cleaner])
    while not os.path.exists("held"):
        time.sleep(0.1)
    with open("cache.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def act(deed, rank):
    if deed in ("none", "skip", "broadcast", "peer"):
        return
    if deed == "metadata":
        read_metadata(rank)
    elif deed == "cache":
        tidy_cache()
    elif deed == "cleaner":
        wait_for_cache_lock()
    elif deed == "download":
        download_shard(400)
    elif deed == "count":
        total, end = 0, time.monotonic() + 400
        while time.monotonic() < end:
            total += sum(range(1000))
    elif deed == "spin":
        number = 1
        while number:
            number = number * 7 % 10007
    elif deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif deed == "done":
        dist.destroy_process_group()
        while True:
            time.sleep(60)
    elif deed == "quit":
        os._exit(0)


def train(options, rank, world):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(10**9):
        deed = options.deed if rank == options.who and step == 5 else "none"
        if deed != "none":
            note("struck", rank)
        act(deed, rank)
        loss = torch.nn.functional.cross_entropy(model(torch.randn(32, 20)), torch.randint(3, (32,)))
        optimizer.zero_grad()
        loss.backward()
        time.sleep(options.think)
        if deed == "broadcast":
            dist.broadcast(torch.zeros(5), 0)
        if deed == "peer":
            dist.recv(torch.zeros(1), (rank + 1) % world)
        if deed != "skip":
            average_gradients(model, world)
        optimizer.step()
        if step % 3 == 0:
            dist.barrier()
        note(f"step {step} ended", rank)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=from_environment("RANK", "SLURM_PROCID"))
    parser.add_argument("--world", type=int, default=from_environment("WORLD_SIZE", "SLURM_NTASKS"))
    parser.add_argument("--deed", default="none")
    parser.add_argument("--who", type=int, default=1)
    parser.add_argument("--think", type=float, default=0.03)
    parser.add_argument("--with", dest="company", default="")
    parser.add_argument("--meet", default=f"tcp://{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}")
    options = parser.parse_args()
    if options.company == "exec" and "MALLOC_ARENA_MAX" not in os.environ:
        own_again()
    note("hello", options.rank)
    helpers = {"tracker": start_tracker, "monitor": start_monitor}
    kept = helpers[options.company]() if options.company in helpers else None
    where = {"init_method": options.meet, "rank": options.rank, "world_size": options.world}
    dist.init_process_group("gloo", timeout=timedelta(minutes=30), **where)
    train(options, options.rank, options.world)
    print(kept)


if __name__ == "__main__":
    main()
