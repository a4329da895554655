"""Which ranks run on which node, and where they stand: readable at 384 ranks, one line per node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bigsci_launch.topology import Coordinate, Topology, compress_ranks


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
        coordinates = compress_coordinates(topology.coordinate(rank) for rank in ranks)
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


def compress_coordinates(coordinates: Iterable[Coordinate]) -> str:
    """Coordinates as boxes: `dp0-1 pp3 tp0-3`; what is no box becomes several, separated by semicolons."""
    tp_at: dict[tuple[int, int], list[int]] = {}
    for at in coordinates:
        tp_at.setdefault((at.pp_rank, at.dp_rank), []).append(at.tp_rank)
    dp_at: dict[tuple[int, str], list[int]] = {}
    for (pp_rank, dp_rank), tp_ranks in sorted(tp_at.items()):
        dp_at.setdefault((pp_rank, compress_ranks(tp_ranks)), []).append(dp_rank)
    pp_at: dict[tuple[str, str], list[int]] = {}
    for (pp_rank, tp), dp_ranks in dp_at.items():
        pp_at.setdefault((compress_ranks(dp_ranks), tp), []).append(pp_rank)
    return "; ".join(f"dp{dp} pp{compress_ranks(pp_ranks)} tp{tp}" for (dp, tp), pp_ranks in pp_at.items())
