"""Makes a hung job of any size, as the bundle that `bsl spy` would collect from it, for benchmarks and tests.

The schedule is that of pipeline training: micro batches with collectives in tensor-parallel groups, then a reduction
over the replicas, then the norm over all ranks. One rank departs from its schedule:

- `skip`: it leaves out the last collective of its tensor-parallel group, as recorders and stacks show;
- `loader`: it waits for its data loader; nothing was recorded, so the only evidence is stacks and /proc.

The stacks are those of `bsl train` under DeepSpeed's pipeline engine, without the frames above the training loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.topology import Coordinate, Topology, compress_ranks

Document = dict[str, Any]
Place = Literal["tp", "dp", "world", "receive", "loader"]

MICRO_BATCHES, PER_MICRO_BATCH = 8, 8
CLOCK_TICKS_PER_S = 100
_TORCH, _SPEED = "/venv/site-packages/torch/", "/venv/site-packages/deepspeed/"
_C10D, _ENGINE = f"{_TORCH}distributed/distributed_c10d.py", f"{_SPEED}runtime/pipe/engine.py"
_COMM = (
    ("_exception_logger.<locals>.wrapper", f"{_TORCH}distributed/c10d_logger.py", 83),
    ("timed_op.<locals>.log_wrapper", f"{_SPEED}comm/comm.py", 129),
)
_LOOP = (
    ("PipelineEngine._exec_schedule", _ENGINE, 1387),
    ("PipelineEngine.train_batch", _ENGINE, 370),
    ("_step", "/src/bigsci_launch/train/loop.py", 166),
    ("train", "/src/bigsci_launch/train/loop.py", 98),
    ("<module>", "/src/bigsci_launch/train/__main__.py", 84),
)
_STACKS: dict[Place, tuple[tuple[str, str, int], ...]] = {
    "tp": (
        ("all_reduce", _C10D, 3252),
        _COMM[0],
        ("TensorParallel.all_reduce", "/src/bigsci_launch/train/parallel/tensor.py", 33),
        ("_CopyToRanks.backward", "/src/bigsci_launch/train/parallel/tensor.py", 68),
        ("DeepSpeedEngine.backward", f"{_SPEED}runtime/engine.py", 3428),
        ("PipelineEngine._exec_backward_pass", _ENGINE, 799),
    ),
    "dp": (
        ("all_reduce", _C10D, 3252),
        *_COMM,
        ("DeepSpeedEngine.allreduce_bucket", f"{_SPEED}runtime/engine.py", 3811),
        ("DeepSpeedEngine.buffered_allreduce_fallback", f"{_SPEED}runtime/engine.py", 3932),
        ("PipelineEngine._exec_reduce_grads", _ENGINE, 292),
    ),
    "world": (
        ("all_reduce", _C10D, 3252),
        *_COMM,
        ("norm_over_all_ranks", "/src/bigsci_launch/train/loop.py", 201),
    ),
    "receive": (
        ("recv", _C10D, 2799),
        *_COMM,
        ("recv", f"{_SPEED}runtime/pipe/p2p.py", 81),
        ("PipelineEngine._exec_recv_grads", _ENGINE, 1216),
    ),
    "loader": (
        ("wait", "/usr/lib/python3.11/multiprocessing/connection.py", 930),
        ("_MultiProcessingDataLoaderIter._try_get_data", f"{_TORCH}utils/data/dataloader.py", 1275),
        ("_MultiProcessingDataLoaderIter._next_data", f"{_TORCH}utils/data/dataloader.py", 1443),
        ("PipelineEngine._exec_load_micro_batch", _ENGINE, 905),
    ),
}
_TOKENS = (("[[2, 64, 64]]", "['BFloat16']"), ("[[2, 64]]", "['Float']"), ("[[2, 2, 64]]", "['Float']"))


@dataclass(frozen=True)
class SyntheticJob:
    """A job that `culprit` hangs in the way of `cause`; recorders hold `ring` entries, 0 for none."""

    topology: Topology
    culprit: int
    cause: Literal["skip", "loader"] = "skip"
    ring: int = 0
    ranks_per_node: int = 8

    @cached_property
    def at(self) -> Coordinate:
        """The coordinate of the culprit."""
        return self.topology.coordinate(self.culprit)

    def place(self, rank: int) -> Place:
        """Return where `rank` waits once nothing moves any longer."""
        here, at = self.topology.coordinate(rank), self.at
        if rank == self.culprit:
            return "world" if self.cause == "skip" else "loader"
        if here.pp_rank > at.pp_rank:
            return "world"
        if here.dp_rank != at.dp_rank:
            # Replicas wait for the ranks of the same stage and tp rank that have not reached the reduction.
            is_passed = self.cause == "skip" and here.pp_rank == at.pp_rank and here.tp_rank == at.tp_rank
            return "world" if is_passed else "dp"
        return "tp" if here.pp_rank == at.pp_rank else "receive"

    def bundle(self) -> Bundle:
        """Return the whole bundle."""
        nodes = tuple(self.node(number) for number in range(-(-self.topology.world_size // self.ranks_per_node)))
        collection = {
            "job": "1234",
            "time": 1795228186.0,
            "topology": str(self.topology),
            "world_size": self.topology.world_size,
            "nodes_asked": [node["node"] for node in nodes],
            "nodes_silent": [],
        }
        return Bundle(collection, nodes)

    def node(self, number: int) -> Document:
        """Return the document that the agent of one node writes."""
        first = number * self.ranks_per_node
        ranks = range(first, min(first + self.ranks_per_node, self.topology.world_size))
        return {
            "node": f"n{number:04d}",
            "clock_ticks_per_s": CLOCK_TICKS_PER_S,
            "problems": [],
            "ranks": [self.rank(rank) for rank in ranks],
        }

    def rank(self, rank: int) -> Document:
        """Return the agent's document for one rank: two samples, with no movement between them."""
        pid = 10_000 + rank % 30_000
        place = self.place(rank)
        safe: Document = {
            "state": "S",
            "wchan": "do_poll" if place == "loader" else "futex_do_wait",
            "comm": "python",
            "cpu_ticks": 17_900,
            "voluntary": 381,
            "involuntary": 923,
            "thread_times": {str(pid): 1_720_946_001, str(pid + 1): 840_601},
        }
        call = {"number": 7 if place == "loader" else 202}
        first: Document = {"mono": 3782.87 + rank / 1e4, **safe, "system_call": call, "children": []}
        first["stack"] = {"threads": [_thread(pid, "MainThread", place)]}
        asleep = {"thread_idle_s": {str(pid): 600.0}}
        last: Document = {"mono": first["mono"] + 1.0, **safe, "same_stack": True, **asleep}
        if self.ring:
            first["recorder"] = {"last_sequence": self.last_sequence(rank)}
            last["recorder"] = self.recorder(rank)
        return {"rank": rank, "pid": pid, "step": "0", "world_size": self.topology.world_size, "samples": [first, last]}

    def groups(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the rank's groups by torch's name, with their members; numbered as if created axis by axis."""
        here, sizes = self.topology.coordinate(rank), self.topology
        tp = 1 + here.pp_rank * sizes.dp + here.dp_rank
        dp = 1 + sizes.pp * sizes.dp + here.pp_rank * sizes.tp + here.tp_rank
        return {str(tp): sizes.group("tp", rank), str(dp): sizes.group("dp", rank)}

    def num_steps(self) -> int:
        """The number of steps that fill the ring."""
        return max(4, self.ring // (MICRO_BATCHES * PER_MICRO_BATCH + 2) + 2)

    def calls(self, rank: int) -> Iterator[int]:
        """Yield the collectives of `rank` from its first step on, as indices: 0 to 2 tp, 3 dp, 4 all ranks."""
        in_micro_batches = [index % 3 for index in range(PER_MICRO_BATCH)] * MICRO_BATCHES
        for _ in range(self.num_steps() - 1):
            yield from (*in_micro_batches, 3, 4)
        place = self.place(rank)
        if place == "receive":
            yield from in_micro_batches[:-PER_MICRO_BATCH]
            return
        yield from in_micro_batches[:-1]
        if rank != self.culprit:
            yield in_micro_batches[-1]
        yield from {"tp": (), "dp": (3,), "world": (3, 4)}.get(place, ())

    def recorder(self, rank: int) -> Document:
        """Return the recorder of `rank` as the node agent writes it."""
        tp, dp = self.groups(rank)
        calls = list(self.calls(rank))
        tokens = [[tp, "undefined", "all_reduce", *token] for token in _TOKENS]
        tokens += [[dp, "undefined", "all_reduce", "[[66880]]", "['BFloat16']"]]
        tokens += [["0", "default_pg", "all_reduce", "[[1]]", "['Float']"]]
        kept = calls[-self.ring :]
        return {
            "first_record": len(calls) - len(kept),
            "tokens": tokens,
            "stream": kept,
            "last_sequence": self.last_sequence(rank),
            "open": [] if self.place(rank) in ("receive", "loader") else [len(kept) - 1],
            "members": {name: compress_ranks(ranks) for name, ranks in self.groups(rank).items()},
        }

    def recorded_frames(self, call: int) -> list[dict[str, Any]]:
        """Return the frames from which a rank issued a collective, as the recorder writes them."""
        places: tuple[Place, ...] = ("tp", "tp", "tp", "dp", "world")
        frames = (*_STACKS[places[call]], *_LOOP)
        return [{"name": function, "filename": file, "line": line} for function, file, line in frames]

    def last_sequence(self, rank: int) -> dict[str, int]:
        """Return the newest sequence number in each group."""
        tp, dp = self.groups(rank)
        names = {0: tp, 1: tp, 2: tp, 3: dp, 4: "0"}
        found = {tp: 0, dp: 0, "0": 0}
        for call in self.calls(rank):
            found[names[call]] += 1
        return found


def _thread(pid: int, name: str, place: Place) -> Document:
    frames = [{"function": function, "file": file, "line": line} for function, file, line in (*_STACKS[place], *_LOOP)]
    return {"tid": pid, "name": name, "active": False, "owns_gil": False, "frames": frames}
