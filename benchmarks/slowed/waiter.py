"""A rank that prints the CPU microseconds of a record around a function that does nothing, by what ran before it.

Records with the ring and without it alternate, in pairs. Before each of them is nothing, an `all_reduce` in which ranks
wait for each other, or that and an addition to 2 MiB of numbers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from slowed.stepper import Switch

CALLS = 2000


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    distributed = sys.modules["torch.distributed.distributed_c10d"]
    recorded = sys.modules["ring_torch"].recorded(distributed, "all_reduce", 0, 2)(lambda *_: None)
    unrecorded: Any = dist.all_reduce._bsl_original  # type: ignore[attr-defined]
    numbers, values = torch.ones(1 << 19), torch.ones(256)
    recorded(values)
    switch = Switch()

    def meet() -> None:
        unrecorded(values)

    def meet_and_add() -> None:
        unrecorded(values)
        numbers.add_(1.0)

    found = {}
    for name, before in (("nothing", lambda: None), ("wait", meet), ("add", meet_and_add)):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(CALLS):
            is_on = number % 4 in (0, 3)
            switch.turn(on=is_on)
            before()
            began = time.thread_time()
            recorded(values)
            seconds[is_on].append(time.thread_time() - began)
        found[name] = (median(seconds[True]) - median(seconds[False])) * 1e6
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
