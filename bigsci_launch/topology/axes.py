"""The axes of parallelism as data: a new axis is a row here and a key in the run file.

Context and expert parallelism are axes like the others: a rank has one index on each, and `tp * cp * ep * dp * pp` is
the world size. Frameworks that spread experts over the data-parallel ranks (DeepSpeed, Megatron's expert groups,
torchtitan) need no separate axis for that: there, `ep` is 1, and dp counts all replicas.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of parallelism.

    Attributes:
        name: `tp`, as in `tp=2` and `tp1`.
        words: `tensor-parallel`, as in "the tensor-parallel group".
        key: `tensor_parallel_size`, its key in the section `parallelism` of a run file.
        is_always_written: whether it appears in texts and documents at size 1 too.
    """

    name: str
    words: str
    key: str
    is_always_written: bool = False


TP = Axis("tp", "tensor-parallel", "tensor_parallel_size", is_always_written=True)
CP = Axis("cp", "context-parallel", "context_parallel_size")
EP = Axis("ep", "expert-parallel", "expert_parallel_size")
DP = Axis("dp", "data-parallel", "data_parallel_size", is_always_written=True)
PP = Axis("pp", "pipeline-parallel", "pipeline_parallel_size", is_always_written=True)

AXES = (TP, CP, EP, DP, PP)
"""In the order in which ranks are numbered, fastest first: Megatron's `tp-cp-ep-dp-pp`."""
WRITTEN = (TP, CP, EP, PP, DP)
"""In the order of `tp=2,pp=2,dp=2`. Coordinates are written the other way round: `dp0 pp3 tp1`."""
AXIS_NAMES = tuple(axis.name for axis in AXES)
