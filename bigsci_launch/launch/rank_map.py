"""Which ranks run on which node, and where they stand: readable at 384 ranks, one line per node."""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.topology import Topology, compress_ranks
from bigsci_launch.topology.words import name_coordinates


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The ranks of one node, counted as SLURM_NODEID counts, and their compressed coordinates."""

    node_rank: int
    ranks: str
    coordinates: str


def rank_map(topology: Topology, ranks_per_node: int) -> list[NodeRanks]:
    """The ranks of every node, in order."""
    entries = []
    for node_rank, first in enumerate(range(0, topology.world_size, ranks_per_node)):
        ranks = range(first, min(first + ranks_per_node, topology.world_size))
        coordinates = name_coordinates(topology.coordinate(rank) for rank in ranks)
        entries.append(NodeRanks(node_rank, compress_ranks(ranks), coordinates))
    return entries


def rank_map_lines(topology: Topology, ranks_per_node: int) -> list[str]:
    """The map as text, columns aligned."""
    entries = rank_map(topology, ranks_per_node)
    node_width, rank_width = len(str(entries[-1].node_rank)), max(len(entry.ranks) for entry in entries)
    return [
        f"node {entry.node_rank:>{node_width}}  ranks {entry.ranks:<{rank_width}}  {entry.coordinates}"
        for entry in entries
    ]
