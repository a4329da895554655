"""A training by Ray Train without a framework: `ray_train.py --how WAY --rank N --size 4`."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import ray
import ray.train
from faults import FAULTS, note_truth
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def train(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank = context.get_world_rank()
    os.environ["LOCAL_RANK"] = str(context.get_local_rank())
    for step in range(1, config["steps"] + 1):
        if step == 3 and rank == config["rank"] and config["how"] != "none":
            note_truth(rank, config["how"])
            FAULTS[config["how"]]()
        print(f"step {step}/{config['steps']} loss {1 / step:.4f}", flush=True)
        time.sleep(0.3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="none")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    alone = {"num_cpus": options.size + 1, "include_dashboard": False, "object_store_memory": 80_000_000}
    ray.init(**({} if "RAY_ADDRESS" in os.environ else alone))
    trainer = DataParallelTrainer(
        train,
        train_loop_config=vars(options),
        scaling_config=ray.train.ScalingConfig(num_workers=options.size, placement_strategy="SPREAD"),
        run_config=ray.train.RunConfig(storage_path=tempfile.mkdtemp(prefix="lf-results-", dir=os.environ["LOGS"])),
    )
    trainer.fit()
    print("done")


if __name__ == "__main__":
    main()
