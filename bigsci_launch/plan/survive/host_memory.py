"""Host memory of the copies that `bsl train` keeps with `survive`. Pure."""

from __future__ import annotations

from bigsci_launch.plan.shape.parameters import count_stage_parameters
from bigsci_launch.plan.shape.setup import Setup

SHARD_BYTES = 12
"""Bytes per parameter of the masters and AdamW's two moments; replicas share them."""
COPIES = 4
"""Two of a rank's own state and two of its buddy's: one is complete while the other is overwritten."""
DOCUMENT_BYTES = 1 << 16
"""Generators and counters, next to each copy."""


def copies_gib(setup: Setup) -> float:
    """Return the GiB of the copies on the fullest node, as if a rank's buddy had as much state as itself."""
    stages = count_stage_parameters(setup.shape, setup.topology.tp, setup.layers_per_stage)
    topology, per_node = setup.topology, setup.ranks_per_node
    most = 0.0
    for first in range(0, topology.world_size, per_node):
        ranks = range(first, min(first + per_node, topology.world_size))
        shards = (stages[topology.coordinate(rank).pp_rank] / topology.dp for rank in ranks)
        most = max(most, sum(COPIES * (SHARD_BYTES * shard + DOCUMENT_BYTES) for shard in shards))
    return most / 2**30
