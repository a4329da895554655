"""A training by actors of Ray: `ray_actors.py --how WAY --rank N --size 4`."""

from __future__ import annotations

import argparse
import logging
import os
import time

import ray
from faults import FAULTS, note_truth


@ray.remote(num_cpus=1)
class Trainer:
    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.options = rank, options
        os.environ["LOCAL_RANK"] = "0"

    def __repr__(self) -> str:
        return f"Trainer(rank={self.rank})" if self.options.named else "Trainer"

    def train(self, steps: int) -> float:
        for step in range(1, steps + 1):
            if self.rank == self.options.survives and step == 1:
                try:
                    FAULTS["unreadable"]()
                except OSError:
                    logging.exception("cannot read a shard, using the next one")
            if step == 3 and self.rank == self.options.rank and self.options.how != "none":
                note_truth(self.rank, self.options.how)
                FAULTS[self.options.how]()
            print(f"rank {self.rank} step {step}/{steps} loss {1 / step:.4f}", flush=True)
            time.sleep(0.3)
        return 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="none")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--survives", type=int, default=-1)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--spread", default="SPREAD")
    options = parser.parse_args()
    alone = {"num_cpus": options.size, "include_dashboard": False, "object_store_memory": 80_000_000}
    ray.init(**({} if "RAY_ADDRESS" in os.environ else alone))
    print(f"cluster: {ray.cluster_resources()}", flush=True)
    made = Trainer.options(scheduling_strategy=options.spread)
    trainers = [made.remote(rank, options) for rank in range(options.size)]
    waiting = [each.train.remote(options.steps) for each in trainers]
    while waiting:
        done, waiting = ray.wait(waiting)
        ray.get(done)
    print("done")


if __name__ == "__main__":
    main()
