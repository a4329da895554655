"""A training in which one rank has a chore that takes very long, but makes progress, while the others wait for it.

python -m torch.distributed.run --nproc-per-node 4 long_chores.py CHORE CULPRIT

`stream`   saves weights to the input of a program that takes them at 128 KiB a second
`build`    lets a C++ compiler build one kernel after the other
`describe` gathers a large object: packing each of its records takes a while
"""

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diary import note
from torch import nn

SLOW_READER = "import sys, time\nwhile sys.stdin.buffer.read(65536): time.sleep(0.5)"
KERNEL = """#include <map>
#include <regex>
int kernel_{0}(std::map<int, int>& m) {{ std::regex r("a{0}b*"); return m[{0}]; }}
"""


def stream(rank, culprit):
    if rank == culprit:
        weights = {f"layer.{number}": torch.randn(512, 512) for number in range(200)}
        with subprocess.Popen([sys.executable, "-c", SLOW_READER], stdin=subprocess.PIPE) as reader:
            torch.save(weights, reader.stdin)
    dist.barrier()


def build(rank, culprit):
    if rank == culprit:
        for number in range(2000):
            source = Path(f"kernel_{number}.cpp")
            source.write_text(KERNEL.format(number))
            subprocess.run(["g++", "-O2", "-c", source.name], check=True)
    dist.broadcast(torch.zeros(1), src=culprit)


class Record:
    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        digest = str(self.number).encode()
        for _ in range(20_000):
            digest = hashlib.sha256(digest).digest()
        return (bytes, (digest,))


def describe(rank, culprit):
    mine = [Record(number) for number in range(200_000)] if rank == culprit else []
    dist.all_gather_object([None] * dist.get_world_size(), mine)


CHORES = {each.__name__: each for each in (stream, build, describe)}


def main():
    chore, culprit = CHORES[sys.argv[1]], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    model = nn.Linear(32, 32)
    for step in range(100_000):
        if step == 5:
            if rank == culprit:
                note("struck", rank)
            chore(rank, culprit)
        model(torch.randn(4, 32)).sum().backward()
        dist.all_reduce(model.weight.grad)
        model.zero_grad()
        time.sleep(0.1)
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
