"""A training loop in the shape of Megatron's, on gloo and a CPU, in which the rank programs of the lab hang.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python divergence.py skip --culprit 1

A rank program (`divergence.py`, `host_stall.py`, ...) subclasses `Training` once per recipe. All ranks run the same
recipe; the culprit misbehaves ("strikes") at `--step`, after healthy steps that leave a history. With BSL_RUN_DIR and
BSL_ATTEMPT in the environment a rank writes what the trainer of bsl writes: `events/`, `errors/` and, for the recorded
collectives of torch, the socket `recorder/rank-NNNN.sock`. If it keeps a ring of its last calls, it marks its steps in
it, as the trainer does. What only the lab may know goes to `BSL_RUN_DIR/lab/`. With `survive`, the culprit only
misbehaves in the first generation (BSL_GENERATION).

Stand-alone: the standard library and torch, which is imported inside functions.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

NUM_FEATURES = 16
AXES = ("tp", "cp", "ep", "dp", "pp")
"""In the order in which ranks are numbered, fastest first, as in bigsci_launch/topology."""
GROUP_NAMES = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP",
}
REST_S = 3600.0
"""How long a recipe sleeps instead of forever, so that a rank that is left behind ends on its own."""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of a reproduced hang.")
    parser.add_argument("recipe")
    parser.add_argument("--topology", type=parse_topology, default={"tp": 2, "pp": 1, "dp": 2})
    parser.add_argument("--culprit", type=int, default=1)
    parser.add_argument("--step", type=int, default=10, help="the step at which the culprit strikes")
    parser.add_argument("--steps", type=int, default=10**9, help="the last step")
    parser.add_argument("--timeout", type=float, default=REST_S, help="seconds until a collective gives up")
    return parser.parse_args(arguments)


def parse_topology(text: str) -> dict[str, int]:
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        sizes[axis] = int(size)
    return sizes


class Place:
    """The index of a rank on each axis, and who shares a group with it."""

    def __init__(self, rank: int, sizes: dict[str, int]) -> None:
        self.rank, self.sizes = rank, sizes
        self.world_size = math.prod(sizes.values())
        self.index = self.index_of(rank)
        self.coordinate = {axis: self.index[axis] for axis in AXES if axis in GROUP_NAMES or sizes[axis] > 1}

    def index_of(self, rank: int) -> dict[str, int]:
        index = {}
        for axis in AXES:
            rank, index[axis] = divmod(rank, self.sizes[axis])
        return index

    def rank_at(self, index: dict[str, int]) -> int:
        rank = 0
        for axis in reversed(AXES):
            rank = rank * self.sizes[axis] + index[axis]
        return rank

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks that differ from `rank` only on `axes`, including itself."""
        at = self.index_of(rank)
        same = [axis for axis in self.sizes if axis not in axes]
        return [other for other in range(self.world_size) if all(self.index_of(other)[a] == at[a] for a in same)]

    def groups(self, *axes: str) -> list[list[int]]:
        return sorted(map(list, {tuple(self.group_of(rank, *axes)) for rank in range(self.world_size)}))

    def neighbour(self, rank: int, axis: str) -> int:
        """Return the next rank after `rank` on `axis`, cyclically."""
        at = self.index_of(rank)
        return self.rank_at({**at, axis: (at[axis] + 1) % self.sizes[axis]})


class Training:
    """One rank. Subclasses override what their recipe does differently; `strikes()` says when."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank = int(os.environ["RANK"])
        self.place = Place(self.rank, options.topology)
        self.culprit: int = options.culprit
        self.step = 0
        self.has_struck = False
        self.is_cured = os.environ.get("BSL_GENERATION", "0") != "0"
        """Whether the run has been recovered from the fault, which happens once."""
        self.run_dir = Path(os.environ["BSL_RUN_DIR"]) if "BSL_RUN_DIR" in os.environ else None
        self.attempt = self.run_dir / "attempts" / os.environ["BSL_ATTEMPT"] if self.run_dir else None
        self.events = self.open_events()

    # ------------------------------------------------------------------------------------------------ records

    def open_events(self) -> int | None:
        if self.attempt is None:
            return None
        path = self.attempt / "events" / f"rank-{self.rank:04d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def event(self, kind: str, **fields: Any) -> None:
        record = {"kind": kind, "time": time.time(), "mono": time.monotonic(), "step": self.step, **fields}
        if self.events is not None:
            os.write(self.events, (json.dumps(record) + "\n").encode())

    def enter(self, phase: str) -> None:
        self.event("heartbeat", phase=phase)
        if (hook := sys.modules.get("ring_hook")) is not None:
            hook.mark(self.step, phase)

    def note(self, name: str, text: str = "") -> None:
        """Leave a note that only the lab reads."""
        if self.run_dir is not None:
            folder = self.run_dir / "lab"
            folder.mkdir(exist_ok=True)
            (folder / f"{name}-{self.rank:04d}").write_text(text)

    def strikes(self, rank: int | None = None) -> bool:
        """Whether this rank is `rank` (default: the culprit) and the time has come; the lab gets a note of it."""
        return self.has_come() and self.is_rank(rank)

    def has_come(self) -> bool:
        return self.step == self.options.step and not self.is_cured

    def is_rank(self, rank: int | None = None) -> bool:
        """Whether this rank is `rank` (default: the culprit); the lab gets a note of it."""
        if self.is_cured or self.rank != (self.culprit if rank is None else rank):
            return False
        if not self.has_struck:
            self.note("struck", str(os.getpid()))
        self.has_struck = True
        return True

    # ------------------------------------------------------------------------------------------------ start

    def before_init(self) -> None:
        """Do what happens before the rendezvous of the ranks."""

    def initialize_distributed(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        timeout = timedelta(seconds=self.options.timeout)
        dist.init_process_group("gloo", timeout=timeout)
        self.groups = {axis: self.initialize_model_parallel(axis, timeout) for axis in ("tp", "pp", "dp")}
        self.weight = torch.full((NUM_FEATURES, NUM_FEATURES), 1.0 / NUM_FEATURES)
        self.gradient = torch.zeros(NUM_FEATURES * NUM_FEATURES)

    def initialize_model_parallel(self, axis: str, timeout: timedelta) -> Any:
        """Return this rank's group on `axis`; every rank creates every group, as torch requires."""
        import torch.distributed as dist

        own = None
        for ranks in self.place.groups(axis):
            if len(ranks) > 1:
                group = dist.new_group(ranks, timeout=timeout, group_desc=GROUP_NAMES[axis])
                own = group if self.rank in ranks else own
        return own

    def offer_recorder(self) -> None:
        """Serve the collectives that torch recorded, from a thread that needs no GIL, and write the groups' members."""
        if self.attempt is None or os.environ.get("BSL_LAB_RECORDER") == "0":
            return
        from torch._C._distributed_c10d import _WorkerServer
        from torch.distributed.distributed_c10d import _world

        folder = self.attempt / "recorder"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self.rank:04d}"
        groups = _world.pg_group_ranks.items()
        members = {group.group_name: sorted(ranks) for group, ranks in groups if self.rank in ranks}
        (folder / f"{name}.json").write_text(json.dumps({"members": members}))
        with inside(folder):  # the path of a socket is limited to 107 bytes, that of a run is not
            Path(f"{name}.sock").unlink(missing_ok=True)  # that of the generation before
            mask = os.umask(0o177)  # only the owner may connect: the server does not authenticate clients
            self.recorder = _WorkerServer(f"{name}.sock")
            os.umask(mask)

    # ------------------------------------------------------------------------------------------------ steps

    def pretrain(self) -> None:
        self.event("start", world_size=self.place.world_size, coordinate=self.place.coordinate,
                   host=socket.gethostname(), pid=os.getpid())  # fmt: skip
        self.enter("init")
        self.before_init()
        self.initialize_distributed()
        self.offer_recorder()
        self.train()
        self.enter("end")
        self.finish()
        self.event("end", reason="finished")

    def train(self) -> None:
        while self.step < self.options.steps:
            self.step += 1
            self.enter("step")
            self.train_step()
            self.training_log()

    def train_step(self) -> None:
        self.forward_backward_pipelining()
        self.allreduce_gradients()
        self.optimizer_step()

    def forward_backward_pipelining(self) -> None:
        batch = self.get_batch()
        output = self.forward_step(self.recv_forward(batch))
        self.send_forward(output)
        self.backward_step(self.recv_backward(output))
        self.send_backward(output)

    def get_batch(self) -> Any:
        import torch

        return torch.full((NUM_FEATURES, NUM_FEATURES), float(self.step % 7))

    def forward_step(self, batch: Any) -> Any:
        return self.reduce_from_tensor_model_parallel_region(batch @ self.weight)

    def backward_step(self, gradient: Any) -> None:
        self.gradient += self.reduce_from_tensor_model_parallel_region(gradient @ self.weight).flatten()

    def reduce_from_tensor_model_parallel_region(self, tensor: Any) -> Any:
        self.all_reduce(tensor, "tp")
        return tensor

    def allreduce_gradients(self) -> None:
        self.all_reduce(self.gradient, "dp")

    def optimizer_step(self) -> None:
        norm = self.clip_grad_norm()
        self.weight -= 1e-6 * self.gradient.view_as(self.weight) / (norm + 1.0)
        self.gradient.zero_()

    def clip_grad_norm(self) -> Any:
        import torch.distributed as dist

        norm = self.gradient.norm().reshape(1)
        dist.all_reduce(norm)
        return norm

    def all_reduce(self, tensor: Any, axis: str) -> None:
        import torch.distributed as dist

        if self.groups[axis] is not None:
            dist.all_reduce(tensor, group=self.groups[axis])

    def training_log(self) -> None:
        if self.rank == self.place.world_size - 1:
            print(f" iteration {self.step:8d} | lm loss: {1.0 / self.step:.6E} | grad norm: 1.000 |", flush=True)

    def finish(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()

    # ------------------------------------------------------------------------------------------------ pipeline

    def recv_forward(self, batch: Any) -> Any:
        return batch if self.place.index["pp"] == 0 else self.recv(batch, -1)

    def send_forward(self, output: Any) -> None:
        if self.place.index["pp"] < self.place.sizes["pp"] - 1:
            self.send(output, +1)

    def recv_backward(self, output: Any) -> Any:
        return output if self.place.index["pp"] == self.place.sizes["pp"] - 1 else self.recv(output.clone(), +1)

    def send_backward(self, gradient: Any) -> None:
        if self.place.index["pp"] > 0:
            self.send(gradient, -1)

    def stage(self, offset: int) -> int:
        """The rank with this rank's tp and dp, `offset` pipeline stages on."""
        return self.place.rank_at({**self.place.index, "pp": self.place.index["pp"] + offset})

    def send(self, tensor: Any, offset: int) -> None:
        import torch.distributed as dist

        dist.send(tensor, dst=self.stage(offset))

    def recv(self, tensor: Any, offset: int) -> Any:
        import torch.distributed as dist

        dist.recv(tensor, src=self.stage(offset))
        return tensor

    # ------------------------------------------------------------------------------------------------ errors

    def write_error(self, error: BaseException) -> None:
        """`errors/rank-NNNN.json`, as the trainer writes it."""
        if self.attempt is None:
            return
        host = socket.gethostname()
        record = {"rank": self.rank, "host": host, "node": os.environ.get("SLURMD_NODENAME", host),
                  "coordinate": self.place.coordinate, "step": self.step, "type": type(error).__name__,
                  "message": str(error), "traceback": traceback.format_exc(), "time": time.time()}  # fmt: skip
        folder = self.attempt / "errors"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank-{self.rank:04d}.json").write_text(json.dumps(record, indent=1))


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Change to `folder` and back (`contextlib.chdir` needs Python 3.11)."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def sleep_for_ever() -> NoReturn:
    time.sleep(REST_S)
    sys.exit("this rank was never ended")


def enter_namespaces() -> None:
    """Move this process, before it has threads, into the namespaces of a stage: BSL_LAB_NAMESPACES is `PID:net,mnt`."""
    pid, _, kinds = os.environ.get("BSL_LAB_NAMESPACES", "").partition(":")
    for kind in kinds.split(",") if kinds else []:
        descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of {pid}")
        os.close(descriptor)


def main(recipes: dict[str, type[Training]], arguments: list[str] | None = None) -> None:
    """Run the recipe that the command line names."""
    options = parse_arguments(arguments)
    enter_namespaces()
    training = recipes[options.recipe](options)
    try:
        training.pretrain()
    except Exception as error:
        training.write_error(error)
        raise
