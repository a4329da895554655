"""Two ranks of gloo, one of which is killed in the middle of a transfer: `forgotten_wait.py message|collective`.

Rank 1 stops with the transfer half done, and rank 0 kills it. Rank 0 prints what ended its wait, and after how long.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bigsci_launch.train.survive.blocked import end_blocked_communication
from bigsci_launch.train.survive.waits import Waits

SIZE = 25_000_000


def main() -> None:
    dist.init_process_group("gloo")
    is_first, over = dist.get_rank() == 0, threading.Event()
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, 1)
    data = torch.ones(SIZE)
    Waits(over.is_set).install()
    if is_first:
        threading.Thread(target=end_soon, args=(int(pid), over), daemon=True).start()
    started = time.monotonic()
    try:
        if sys.argv[1] == "message":
            transfer(data, is_first)
        else:
            if not is_first:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
            for _ in range(100):
                dist.all_reduce(data)
    except Exception as error:
        print(f"{type(error).__name__} after {time.monotonic() - started:.1f} s", flush=True)
        os._exit(0)
    os._exit(1)


def transfer(data: torch.Tensor, is_first: bool) -> None:
    if is_first:
        dist.send(data, 1)
    else:
        dist.irecv(data, 0)
        os.kill(os.getpid(), signal.SIGSTOP)


def end_soon(peer: int, over: threading.Event) -> None:
    """Kill the peer once it has stopped, and end the generation as the control thread does."""
    while Path(f"/proc/{peer}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(peer, signal.SIGKILL)
    time.sleep(0.3)
    over.set()
    while True:
        end_blocked_communication()
        time.sleep(0.03)


if __name__ == "__main__":
    main()
