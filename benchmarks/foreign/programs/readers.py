"""Image-like batches from DataLoader workers, forked or spawned."""

import argparse
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from diary import note
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, get_worker_info

DECODER = threading.Lock()


class Images(Dataset):
    def __init__(self, options, rank):
        self.options, self.rank = options, rank

    def __len__(self):
        return 100000

    def __getitem__(self, index):
        quirk = self.options.quirk
        if quirk == "slow-decode":
            time.sleep(0.3)
        if index == 90 and self.rank == self.options.at and quirk in ("decoder", "stopped", "fifo", "remote"):
            note("struck", self.rank)
            if quirk == "decoder":
                DECODER.acquire()
                DECODER.acquire()
            if quirk == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if quirk == "fifo":
                os.read(os.pipe()[0], 100)
            if quirk == "remote":
                for _ in range(180):
                    time.sleep(5)
        with DECODER:
            return torch.full((48,), float(index % 7)) + (get_worker_info().id if get_worker_info() else 0)


def learn(options):
    rank = int(os.environ["RANK"])
    note("hello", rank)
    dist.init_process_group("gloo")
    net = DistributedDataParallel(torch.nn.Linear(48, 4))
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(
        Images(options, rank), batch_size=10, num_workers=options.workers, multiprocessing_context=options.method
    )
    for number, batch in enumerate(loader):
        net(batch).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
        if number < 10 or number % 100 == 0:
            note(f"step {number}", rank)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="fork")
    parser.add_argument("--quirk", default="")
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--workers", type=int, default=1)
    learn(parser.parse_args())
