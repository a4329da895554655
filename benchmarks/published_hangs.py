"""Rebuilds the hangs of BLOOM's chronicles at full size, as py-spy text and as bundles of `bsl spy`.

    python benchmarks/published_hangs.py FOLDER

Sources, all in bigscience-workshop/bigscience, train/tr11-176B-ml:
- `prequel`: chronicles-prequel.md, "Hanging Issue": 40 nodes of 8 (tp8, pp10, dp4). On each node six processes have
  left `train_step` and two are in a broadcast. Both stacks are printed there.
- `replica`: chronicles.md, 2022-04-30: 2 nodes of 8 (tp4, pp2, dp2), "4 + 1 + 3" and "4 + 4". All five stacks and all
  sixteen thread numbers are printed there.
- `evaluation`: chronicles.md, 2022-05-18: 48 nodes of 8 (tp4, pp12, dp8). The innermost call of each process on four
  kinds of nodes is printed there, and the whole stack of the process that waits for its data loader.

What the chronicles leave out is filled in consistently with everything they say:
- `prequel`: the two processes are tp5 and tp6 on every node. The chronicle shows nodes 0 and 1; the others are rebuilt
  in the same way, because it says "the same story on each node".
- `evaluation`: the text names iam02, iam03, iam06, iam50 and iam52; the other 43 nodes are taken from iam01 to iam51.
  Sixteen processes are listed under iam52: its own eight, and those of a node whose heading is missing. The innermost
  calls belong to the stacks of `replica`, with the line numbers of the one printed again (4 higher in engine.py).
  The stack of `send` is not printed anywhere; its line numbers are 0.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.topology import Coordinate, Topology

RANKS_PER_NODE = 8

_EVALUATE = """\
    evaluate (megatron/training.py:983)
    evaluate_and_print_results (megatron/training.py:1030)
    train (megatron/training.py:904)
    pretrain (megatron/training.py:188)
    main (pretrain_gpt.py:245)
    wrapper (torch/distributed/elastic/multiprocessing/errors/__init__.py:345)
    <module> (pretrain_gpt.py:249)
"""
_LOAD = """\
    _exec_load_micro_batch (deepspeed/runtime/pipe/engine.py:795)
    _exec_schedule (deepspeed/runtime/pipe/engine.py:1380)
    eval_batch (deepspeed/runtime/pipe/engine.py:449)
"""
LEFT_THE_STEP = """\
    train (megatron/training.py:915)
    pretrain (megatron/training.py:187)
    <module> (pretrain_gpt.py:239)
"""
LOSS_BROADCAST = """\
    broadcast (torch/distributed/distributed_c10d.py:1191)
    _aggregate_total_loss (deepspeed/runtime/pipe/engine.py:540)
    train_batch (deepspeed/runtime/pipe/engine.py:330)
    train_step (megatron/training.py:436)
    train (megatron/training.py:851)
    pretrain (megatron/training.py:187)
    <module> (pretrain_gpt.py:239)
"""
RESULT_BROADCAST = (
    """\
    broadcast (torch/distributed/distributed_c10d.py:1191)
    _bcast_pipe_scalar (deepspeed/runtime/pipe/engine.py:542)
    eval_batch (deepspeed/runtime/pipe/engine.py:455)
"""
    + _EVALUATE
)
LOADER = (
    """\
    wait (threading.py:306)
    get (queue.py:179)
    _try_get_data (torch/utils/data/dataloader.py:1011)
    _get_data (torch/utils/data/dataloader.py:1163)
    _next_data (torch/utils/data/dataloader.py:1207)
    __next__ (torch/utils/data/dataloader.py:530)
    _next_batch (deepspeed/runtime/pipe/engine.py:627)
"""
    + _LOAD
    + _EVALUATE
)
BATCH_BROADCAST = (
    """\
    broadcast (torch/distributed/distributed_c10d.py:1191)
    _build_key_size_numel_dictionaries (megatron/mpu/data.py:50)
    broadcast_data (megatron/mpu/data.py:88)
    get_batch_pipe (pretrain_gpt.py:136)
    _next_batch (deepspeed/runtime/pipe/engine.py:631)
"""
    + _LOAD
    + _EVALUATE
)
RESULT_REDUCE = (
    """\
    all_reduce (torch/distributed/distributed_c10d.py:1316)
    _reduce_outputs (deepspeed/runtime/pipe/engine.py:519)
    eval_batch (deepspeed/runtime/pipe/engine.py:452)
"""
    + _EVALUATE
)
RECEIVE = (
    """\
    recv (torch/distributed/distributed_c10d.py:1002)
    recv (deepspeed/runtime/pipe/p2p.py:83)
    _exec_recv_activations (deepspeed/runtime/pipe/engine.py:1073)
    _exec_schedule (deepspeed/runtime/pipe/engine.py:1380)
    eval_batch (deepspeed/runtime/pipe/engine.py:449)
"""
    + _EVALUATE
)
SEND = (
    """\
    send (torch/distributed/distributed_c10d.py:0)
    send (deepspeed/runtime/pipe/p2p.py:0)
    _exec_send_activations (deepspeed/runtime/pipe/engine.py:0)
    _exec_schedule (deepspeed/runtime/pipe/engine.py:1380)
    eval_batch (deepspeed/runtime/pipe/engine.py:449)
"""
    + _EVALUATE
)
REPLICA_THREADS = (
    688510, 688511, 599212, 599213, 688514, 688515, 688516, 688517,
    686181, 686182, 686183, 686184, 686185, 686186, 686187, 686188,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PublishedHang:
    """A hang as a chronicle describes it: the nodes in rank order, and where each rank is."""

    name: str
    topology: Topology
    nodes: tuple[str, ...]
    stack_of: Callable[[Coordinate], str]
    threads: tuple[int, ...] = ()

    def thread(self, rank: int) -> int:
        """Return the number of the rank's main thread."""
        return self.threads[rank] if self.threads else 835990 + rank

    def stack(self, rank: int) -> str:
        return self.stack_of(self.topology.coordinate(rank))

    def is_active(self, rank: int) -> bool:
        """Return whether py-spy calls the thread active: it does so in a call on the device."""
        return "_try_get_data" not in self.stack(rank)

    def ranks_of(self, node: str) -> range:
        first = self.nodes.index(node) * RANKS_PER_NODE
        return range(first, first + RANKS_PER_NODE)


def _prequel(at: Coordinate) -> str:
    return LOSS_BROADCAST if at.tp_rank in (5, 6) else LEFT_THE_STEP


def _replica(at: Coordinate) -> str:
    if at.pp_rank == 1:
        return RECEIVE if at.dp_rank == 1 else RESULT_REDUCE
    if at.dp_rank == 0:
        return RESULT_BROADCAST
    return LOADER if at.tp_rank == 0 else BATCH_BROADCAST


def _evaluation(at: Coordinate) -> str:
    """Return a rank's stack: replica dp6 hangs at its last stage, earlier stages cannot send, the rest wait."""
    is_last, hangs = at.pp_rank == 11, at.dp_rank == 6
    if not hangs:
        return _redux(RESULT_REDUCE if is_last else RESULT_BROADCAST)
    if not is_last:
        return _redux(SEND)
    return _redux(LOADER) if at.tp_rank == 0 else _redux(BATCH_BROADCAST)


def _redux(stack: str) -> str:
    """Return a stack of 2022-04-30 with the line numbers of 2022-05-18, which are 4 higher."""
    return re.sub(r"(pipe/engine\.py:)([1-9]\d*)", lambda found: f"{found[1]}{int(found[2]) + 4}", stack)


def _iam(*numbers: int) -> tuple[str, ...]:
    return tuple(f"jean-zay-iam{number:02d}" for number in numbers)


HANGS = (
    PublishedHang("prequel", Topology(tp=8, pp=10, dp=4), _iam(*range(1, 41)), _prequel),
    PublishedHang("replica", Topology(tp=4, pp=2, dp=2), _iam(48, 49), _replica, REPLICA_THREADS),
    PublishedHang(
        "evaluation",
        Topology(tp=4, pp=12, dp=8),
        _iam(*(number for number in range(2, 53) if number not in (5, 20, 35))),
        _evaluation,
    ),
)


def frames_of(stack: str) -> Iterator[dict[str, object]]:
    for function, file, line in re.findall(r"^ {4}(\S+) \((\S+):(\d+)\)$", stack, re.MULTILINE):
        yield {"function": function, "file": file, "line": int(line)}


def rank_document(hang: PublishedHang, rank: int) -> dict[str, object]:
    """Return a bundle's document for a rank known only from one stack."""
    thread = hang.thread(rank)
    stack = {
        "tid": thread,
        "name": "MainThread",
        "active": hang.is_active(rank),
        "owns_gil": False,
        "frames": list(frames_of(hang.stack(rank))),
    }
    sample = {"mono": 0.0, "state": "?", "stack": {"threads": [stack]}}
    return {"rank": rank, "pid": thread, "source": "chronicle", "step": None, "samples": [sample]}


def text_of(hang: PublishedHang, node: str) -> str:
    """Return the output of `py-spy dump` on each of the node's processes, in order."""
    parts = [
        f"Process {hang.thread(rank)}: python -u pretrain_gpt.py\nPython v3.8.12\n\n"
        f'Thread {hang.thread(rank)} ({"active" if hang.is_active(rank) else "idle"}): "MainThread"\n{hang.stack(rank)}'
        for rank in hang.ranks_of(node)
    ]
    return "\n".join(parts)


def write_bundle(hang: PublishedHang, folder: Path) -> None:
    """Write the hang as a bundle of `bsl spy`."""
    (folder / "nodes").mkdir(parents=True, exist_ok=True)
    for node in hang.nodes:
        ranks = [rank_document(hang, rank) for rank in hang.ranks_of(node)]
        document = {"node": node, "clock_ticks_per_s": 100, "found_by": "chronicle", "problems": [], "ranks": ranks}
        (folder / "nodes" / f"{node}.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    collection = {"schema_version": 1, "job": hang.name, "topology": str(hang.topology), "nodes_silent": []}
    (folder / "collection.json").write_text(json.dumps(collection) + "\n")


def write_text(hang: PublishedHang, folder: Path) -> None:
    """Write the hang as the `trace-%N.out` files of the chronicle's srun command."""
    folder.mkdir(parents=True, exist_ok=True)
    for node in hang.nodes:
        (folder / f"trace-{node}.out").write_text(text_of(hang, node))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write NAME/ (a bundle) and NAME-text/ (py-spy text)")
    folder = parser.parse_args().folder
    for hang in HANGS:
        write_bundle(hang, folder / hang.name)
        write_text(hang, folder / f"{hang.name}-text")
        ranks = hang.topology.world_size
        print(f"{folder / hang.name}: {ranks} ranks on {len(hang.nodes)} nodes, {hang.topology}")


if __name__ == "__main__":
    main()
