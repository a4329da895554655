"""Ray Train: a TorchTrainer with four workers on CPUs fits a line.

python ray_fit.py --trouble none --worker 1
"""

import argparse
import os
import signal
import time
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from diary import note
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model


def read_shard(folder, rank):
    pipe = Path(folder) / f"shard-{rank}"
    os.mkfifo(pipe)
    with open(pipe, "rb") as shard:
        return shard.read()


def fetch_features(seconds):
    """The feature store answers on the last attempt."""
    end, delay = time.monotonic() + seconds, 0.5
    while time.monotonic() < end:
        time.sleep(delay)
        delay = min(2 * delay, 3.0)


def augment(seconds):
    end, image = time.monotonic() + seconds, torch.rand(64, 64)
    while time.monotonic() < end:
        image = torch.nn.functional.interpolate(image[None, None], scale_factor=1.1)[0, 0, :64, :64].clamp(0, 1)


def search_threshold():
    low, high = 0.0, 1.0
    while high - low > -1:
        low, high = (low + high) / 2 - 0.5, high


def misbehave(trouble, rank, folder):
    note("struck", rank)
    if trouble == "shard":
        read_shard(folder, rank)
    elif trouble == "features":
        fetch_features(400)
    elif trouble == "augment":
        augment(400)
    elif trouble == "threshold":
        search_threshold()
    elif trouble == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)


def fit_on_worker(config):
    rank = get_context().get_world_rank()
    note("hello", rank)
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mine = config["trouble"] if rank == config["worker"] else "none"
    for step in range(10**9):
        now = mine if step == 5 else "none"
        if now not in ("none", "metric"):
            misbehave(now, rank, config["folder"])
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(config["think"])
        if now == "metric":
            note("struck", rank)
        else:
            dist.all_reduce(loss.detach())
        note(f"step {step} ended", rank)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trouble", default="none")
    parser.add_argument("--worker", type=int, default=1)
    parser.add_argument("--think", type=float, default=0.05)
    parser.add_argument("--folder", default=os.getcwd())
    config = vars(parser.parse_args())
    here = str(Path(__file__).parent)
    search_path = ":".join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    ray.init(num_cpus=5, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": search_path}})
    trainer = TorchTrainer(
        fit_on_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=4, use_gpu=False),
        run_config=RunConfig(storage_path=config["folder"], name="fit"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
