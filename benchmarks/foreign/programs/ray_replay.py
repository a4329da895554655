"""Plain Ray actors: three collectors send experience to a learner, round by round.

python ray_replay.py --trouble none --actor 1
"""

import argparse
import os
import threading
import time
from pathlib import Path

import numpy as np
import ray
from diary import note


class Worker:
    def __init__(self, number, trouble, think):
        self.number, self.trouble, self.think = number, trouble, think
        self.lock = threading.Lock()
        note("hello", number)

    def play(self, round_number):
        if round_number == 5 and self.trouble != "none":
            note("struck", self.number)
            self.reset_environment()
        time.sleep(self.think)
        return np.random.random(100)

    def learn(self, batches):
        if len(batches) and self.trouble != "none":
            note("struck", self.number)
            self.reset_environment()
        return float(np.mean([batch.mean() for batch in batches]))

    def reset_environment(self):
        if self.trouble == "simulator":
            self.lock.acquire()
            self.lock.acquire()
        elif self.trouble == "assets":
            while not Path("/nonexistent/assets.zip").exists():
                time.sleep(1)
        elif self.trouble == "physics":
            end = time.monotonic() + 400
            state = np.ones((32, 32))
            while time.monotonic() < end:
                state = np.tanh(state @ state)


def note_round(number):
    """The driver is no rank."""
    with open(os.environ["FOREIGN_LOG"], "a") as page:
        page.write(f"{time.time():.3f} round {number} ended\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trouble", default="none")
    parser.add_argument("--actor", type=int, default=1)
    parser.add_argument("--think", type=float, default=0.1)
    options = parser.parse_args()
    here = str(Path(__file__).parent)
    search_path = ":".join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    ray.init(num_cpus=5, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": search_path}})
    actors = [
        ray.remote(Worker).remote(number, options.trouble if number == options.actor else "none", options.think)
        for number in range(4)
    ]
    learner, collectors = actors[0], actors[1:]
    for round_number in range(10**9):
        batches = ray.get([collector.play.remote(round_number) for collector in collectors])
        print(ray.get(learner.learn.remote(batches)), flush=True)
        note_round(round_number)


if __name__ == "__main__":
    main()
