"""The rank map: the ranks of each node and their coordinates, one line per node, readable at 384 ranks."""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.topology import Topology, compress_ranks
from bigsci_launch.topology.naming import name_coordinates


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The ranks of one node and their compressed coordinates. `node_rank` counts as SLURM_NODEID does."""

    node_rank: int
    ranks: str
    coordinates: str


def rank_map(topology: Topology, ranks_per_node: int) -> list[NodeRanks]:
    entries = []
    for node_rank, first in enumerate(range(0, topology.world_size, ranks_per_node)):
        ranks = range(first, min(first + ranks_per_node, topology.world_size))
        coordinates = name_coordinates(topology.coordinate(rank) for rank in ranks)
        entries.append(NodeRanks(node_rank, compress_ranks(ranks), coordinates))
    return entries


def rank_map_lines(topology: Topology, ranks_per_node: int) -> list[str]:
    """Return the map as text with aligned columns."""
    entries = rank_map(topology, ranks_per_node)
    node_width, rank_width = len(str(entries[-1].node_rank)), max(len(entry.ranks) for entry in entries)
    return [
        f"node {entry.node_rank:>{node_width}}  ranks {entry.ranks:<{rank_width}}  {entry.coordinates}"
        for entry in entries
    ]
