"""Ranks that exchange messages which they arrange for themselves.

own_messages.py MODE CULPRIT

`threads` two groups are used from two threads, never at a time, by a lock; on the culprit the other thread comes first
`experts` each rank sends tokens to each other one by batch_isend_irecv; the culprit has none for one of them, and sends
          nothing
`results` rank 0 takes the results of each rank in turn, as objects; the culprit has no results, and sends none
`ring`    in round 5 every rank sends to its right neighbour before it receives from its left one
`stages`  healthy: a pipeline with batch_isend_irecv, whose third stage takes much longer than the others
"""

import queue
import sys
import threading
import time

import torch
import torch.distributed as dist
from diary import note
from torch import nn

ODD = 5
BIG = 2_000_000
LOCK = threading.Lock()


class Threads:
    def __init__(self, rank, size, culprit):
        self.rank, self.culprit = rank, culprit
        self.gradients, self.metrics = dist.new_group(), dist.new_group()
        self.asked, self.done = queue.Queue(), queue.Queue()
        threading.Thread(target=self.sum_metrics, daemon=True).start()

    def sum_metrics(self):
        while True:
            self.asked.get()
            with LOCK:
                dist.all_reduce(torch.ones(3), group=self.metrics)
            self.done.put(True)

    def round(self, number):
        is_odd = number == ODD and self.rank == self.culprit
        if is_odd:
            note("struck", self.rank)
            self.asked.put(number)
            time.sleep(1)
        with LOCK:
            dist.all_reduce(torch.ones(100), group=self.gradients)
        if not is_odd:
            self.asked.put(number)
        self.done.get()


class Experts:
    def __init__(self, rank, size, culprit):
        self.rank, self.size, self.culprit = rank, size, culprit
        self.expert = nn.Linear(16, 16)

    def round(self, number):
        others = [other for other in range(self.size) if other != self.rank]
        sent = list(others)
        if number == ODD and self.rank == self.culprit:
            note("struck", self.rank)
            sent.remove((self.rank + 2) % self.size)
        tokens = {other: torch.zeros(32, 16) for other in others}
        works = [dist.P2POp(dist.irecv, tokens[other], other) for other in others]
        works += [dist.P2POp(dist.isend, torch.randn(32, 16), other) for other in sent]
        for work in dist.batch_isend_irecv(works):
            work.wait()
        self.expert(torch.cat(list(tokens.values()))).sum().backward()
        dist.all_reduce(self.expert.weight.grad)


class Results:
    def __init__(self, rank, size, culprit):
        self.rank, self.size, self.culprit = rank, size, culprit

    def round(self, number):
        results = [{"rank": self.rank, "loss": number}]
        if number == ODD and self.rank == self.culprit:
            note("struck", self.rank)
            results = []
        if self.rank == 0:
            for other in range(1, self.size):
                dist.recv_object_list([None], src=other)
        elif results:
            dist.send_object_list(results, dst=0)
        dist.barrier()


class Ring:
    def __init__(self, rank, size, culprit):
        self.rank, self.right, self.left = rank, (rank + 1) % size, (rank - 1) % size

    def round(self, number):
        block, incoming = torch.zeros(BIG), torch.zeros(BIG)
        if number == ODD:
            note("struck", self.rank)
        if number == ODD or self.rank % 2 == 0:
            dist.send(block, self.right)
            dist.recv(incoming, self.left)
        else:
            dist.recv(incoming, self.left)
            dist.send(block, self.right)


class Stages:
    def __init__(self, rank, size, culprit):
        self.rank, self.last = rank, size - 1
        self.seconds = 2.0 if rank == culprit else 0.2

    def exchange(self, receive_from, send_to):
        works = [dist.P2POp(dist.irecv, torch.zeros(64), receive_from)] if 0 <= receive_from <= self.last else []
        works += [dist.P2POp(dist.isend, torch.randn(64), send_to)] if 0 <= send_to <= self.last else []
        for work in dist.batch_isend_irecv(works) if works else ():
            work.wait()

    def compute(self):
        until, rows = time.time() + self.seconds, torch.randn(64, 64)
        while time.time() < until:
            rows = torch.tanh(rows @ rows)

    def round(self, number):
        for _ in range(3):
            self.exchange(self.rank - 1, -1)
            self.compute()
            self.exchange(-1, self.rank + 1)
        for _ in range(3):
            self.exchange(self.rank + 1, -1)
            self.compute()
            self.exchange(-1, self.rank - 1)


MODES = {"threads": Threads, "experts": Experts, "results": Results, "ring": Ring, "stages": Stages}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    mode = MODES[sys.argv[1]](rank, dist.get_world_size(), int(sys.argv[2]))
    for number in range(100_000):
        mode.round(number)
        time.sleep(0.1)
        note(f"step {number}", rank)


if __name__ == "__main__":
    main()
