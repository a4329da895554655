"""How frameworks without DeepSpeed's partitioner cut layers into stages, as the partition method with the same cut.

Megatron cuts layers evenly; embedding and head come on top of the first and the last stage. If that leaves a remainder,
they can count as a layer each (`--account-for-embedding-in-pipeline-split`, `--account-for-loss-in-pipeline-split`).
torchtitan always counts both as a layer, and the first stages get what is left over, which is DeepSpeed's cut of
`type:transformer|embedding` too. Any of them accepts the layers of every stage: `time:7,8,8,7`.
"""

from __future__ import annotations

import re

from bigsci_launch.config.schema.technique import Framework

LAYERS_ONLY, WITH_ENDS = "type:transformer", "type:transformer|embedding"
NUM_ENDS = 2


def parse_layer_counts(method: str) -> tuple[int, ...] | None:
    """The transformer layers of every stage that `time:COUNTS` or `memory:COUNTS` names; None for other methods."""
    match = re.fullmatch(r"(?:time|memory):([1-9]\d*(?:,(?:0|[1-9]\d*))*)", method)
    return tuple(int(count) for count in match[1].split(",")) if match else None


def is_cut_by_deepspeed(framework: Framework | None) -> bool:
    """Return whether DeepSpeed's pipeline trains, so that all its partition methods are possible."""
    return framework in ("bsl", "deepspeed")


def own_method(framework: Framework | None, num_layers: int, pp: int, chunks: int, configured: str) -> str:
    """Return the partition method by which `framework` cuts: the configured one if it can be, else its own."""
    counts = parse_layer_counts(configured)
    if is_cut_by_deepspeed(framework) or (counts and len(counts) == pp and sum(counts) == num_layers):
        return configured
    return LAYERS_ONLY if framework == "megatron" and num_layers % (pp * chunks) == 0 else WITH_ENDS


def can_cut(framework: Framework | None, num_layers: int, pp: int, chunks: int, method: str) -> bool:
    """Return whether `framework` can cut that many layers into `pp` stages of `chunks` chunks by `method`. An unknown
    one can if every chunk gets a layer."""
    stages = pp * chunks
    if is_cut_by_deepspeed(framework):
        return chunks == 1 or num_layers % stages == 0
    if parse_layer_counts(method) is not None:
        return True
    if framework == "megatron":
        return num_layers % stages == 0 or (num_layers + NUM_ENDS) % stages == 0
    return num_layers + (NUM_ENDS if framework else 0) >= stages
