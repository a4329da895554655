"""A pipeline by hand: each rank is a stage, activations go down with isend and irecv, gradients come back."""

import argparse
import os
import queue
import time

import torch
import torch.distributed as dist
from diary import note

MICRO = 4


class Stage:
    def __init__(self, place, last, options):
        self.place, self.last, self.options = place, last, options
        self.layer = torch.nn.Linear(32, 32)
        self.round = 0

    @property
    def is_odd(self):
        return self.round == 4 and self.place == self.options.stage

    def down(self, micro):
        rows = torch.randn(8, 32)
        if self.place > 0:
            dist.irecv(rows, self.place - 1, tag=self.tag(micro)).wait()
        rows.requires_grad_()
        output = self.layer(rows)
        if self.place < self.last:
            dist.isend(output.detach(), self.place + 1, tag=self.tag(micro)).wait()
        return rows, output

    def tag(self, micro):
        if self.is_odd and self.options.flaw == "tag" and micro == 2:
            return 100 + micro
        return micro

    def up(self, rows, output):
        gradient = torch.ones_like(output)
        if self.place < self.last:
            dist.irecv(gradient, self.place + 1, tag=50).wait()
        output.backward(gradient)
        if self.place > 0:
            dist.isend(rows.grad, self.place - 1, tag=50).wait()

    def one_batch(self):
        if self.is_odd and self.options.flaw:
            note("struck", self.place)
            if self.options.flaw == "queue":
                queue.Queue().get()
            if self.options.flaw == "slow":
                for _ in range(300):
                    time.sleep(3)
            if self.options.flaw == "extra":
                dist.send(torch.zeros(4_000_000), (self.place + 1) % (self.last + 1), tag=77)
                dist.recv(torch.zeros(4), (self.place + 1) % (self.last + 1), tag=78)
        kept = [self.down(micro) for micro in range(MICRO)]
        for rows, output in kept:
            self.up(rows, output)
        if self.options.heavy:
            for _ in range(6):
                torch.linalg.eigvals(torch.randn(250, 250))
        self.round += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--flaw", default="")
    parser.add_argument("--stage", type=int, default=-1)
    parser.add_argument("--heavy", action="store_true")
    arguments = parser.parse_args()
    me = int(os.environ["RANK"])
    note("hello", me)
    dist.init_process_group("gloo")
    pipe = Stage(me, dist.get_world_size() - 1, arguments)
    while True:
        pipe.one_batch()
        if pipe.round < 10 or pipe.round % 50 == 0:
            note(f"step {pipe.round}", me)
