"""Linear regression on four JAX processes, one CPU device each, gradients averaged with `psum`.

python jax_regression.py --process-id 0 --num-processes 4 --coordinator 127.0.0.1:9911
"""

import argparse
import os
import signal
import time
import urllib.request
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from diary import note
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")

NAME = "?"


def make_update(mesh):
    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("hosts"), PartitionSpec("hosts")),
        out_specs=(PartitionSpec(), PartitionSpec()),
    )
    def update(weights, x, y):
        def loss_of(weights):
            return jax.lax.pmean(jnp.mean((x @ weights - y) ** 2), "hosts")

        loss, gradient = jax.value_and_grad(loss_of)(weights)
        return weights - 0.01 * gradient, loss

    return update


def local_batch(step, sharding):
    x = np.random.default_rng(step).standard_normal((8, 16)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    return (
        jax.make_array_from_process_local_data(sharding, x),
        jax.make_array_from_process_local_data(sharding, y),
    )


def load_vocabulary(folder):
    pipe = folder / f"vocabulary-{NAME}"
    os.mkfifo(pipe)
    return pipe.read_text()


def wait_for_lease(folder):
    while not (folder / "lease").exists():
        time.sleep(0.5)


def backoff_until_served(seconds):
    end, delay = time.monotonic() + seconds, 0.5
    while time.monotonic() < end:
        try:
            urllib.request.urlopen("http://127.0.0.1:9/features", timeout=5)
        except OSError:
            time.sleep(delay)
            delay = min(delay * 2, 4.0)


def evaluate_by_hand(weights, seconds):
    end, seen, host = time.monotonic() + seconds, 0.0, np.asarray(weights.addressable_data(0))
    while time.monotonic() < end:
        seen += float(np.sum(host * np.random.default_rng(int(seen) % 97).standard_normal(host.shape)))
    return seen


def normalise_forever():
    value = 1
    while value:
        value = (value * 3 + 1) % 1_000_003 or 1


def disturb(trouble, weights, folder):
    if trouble == "vocabulary":
        load_vocabulary(folder)
    elif trouble == "lease":
        wait_for_lease(folder)
    elif trouble == "retry":
        backoff_until_served(400)
    elif trouble == "evaluate":
        evaluate_by_hand(weights, 400)
    elif trouble == "normalise":
        normalise_forever()
    elif trouble == "suspend":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif trouble == "exit":
        os._exit(0)
    elif trouble == "publish":
        multihost_utils.sync_global_devices("publish")


def main():
    global NAME
    parser = argparse.ArgumentParser()
    parser.add_argument("--process-id", type=int, default=int(os.environ.get("JAX_PROCESS_ID", "0")))
    parser.add_argument("--num-processes", type=int, default=4)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--trouble", default="none")
    parser.add_argument("--at", type=int, default=2)
    parser.add_argument("--from-step", type=int, default=5)
    parser.add_argument("--think", type=float, default=0.05)
    parser.add_argument("--folder", type=Path, default=Path("."))
    options = parser.parse_args()
    NAME = str(options.process_id)
    note("hello", NAME)
    jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id)
    mesh = Mesh(np.array(jax.devices()), ("hosts",))
    sharding = NamedSharding(mesh, PartitionSpec("hosts"))
    update = make_update(mesh)
    weights = jnp.zeros((16, 1))
    for step in range(10**9):
        if step == options.from_step and options.at == options.process_id:
            if options.trouble != "none":
                note("struck", NAME)
            disturb(options.trouble, weights, options.folder)
        x, y = local_batch(step, sharding)
        time.sleep(options.think)
        weights, loss = update(weights, x, y)
        print(f"step {step} loss {float(loss):.3f}", flush=True)
        note(f"step {step} ended", NAME)


if __name__ == "__main__":
    main()
