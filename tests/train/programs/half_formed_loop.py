"""A loop with `Survivor` in which rank 0 waits, in generation 0, for a rank that never comes to the group.

FORMING=store: nothing listens where the store should be, as when rank 0 of another node has died. FORMING=group: rank 1
has told its addresses, and dies before it has connected to them.
"""

import os
import socket
import threading

import torch
import torch.distributed as dist
from torch import nn

from bigsci_launch.train.survivor import Survivor


class Silent(dist.Store):
    """A store in which a rank tells its own address, and reads none."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def set(self, key, value):
        self.store.set(key, value)

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get(self, key):
        threading.Event().wait()

    def wait(self, *keys):
        threading.Event().wait()


def wait_for_store():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        print("waits", flush=True)
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], 2, is_master=False)


def wait_for_group(rank):
    """Form groups until rank 0 has to wait: of two ranks of gloo, one connects to the other, whichever has the port."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    if rank == 0:
        print("waits", flush=True)
    for number in range(16):
        if rank == 0:
            dist.ProcessGroupGloo(dist.PrefixStore(str(number), store), 0, 2)
        else:
            mine = Silent(dist.PrefixStore(str(number), store))
            threading.Thread(target=dist.ProcessGroupGloo, args=(mine, 1, 2), daemon=True).start()
    threading.Event().wait(0 if rank == 0 else None)


def train(survivor):
    rank = int(os.environ["RANK"])
    if os.environ["BSL_GENERATION"] == "0":
        wait_for_store() if os.environ["FORMING"] == "store" else wait_for_group(rank)
    dist.init_process_group("gloo")
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    survivor.keep({"model": model, "optimizer": optimizer})
    for step in survivor.steps(2):
        for _ in step:
            pass
        with step.update():
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    Survivor(global_batch=2, micro_batch=1).run(train)
