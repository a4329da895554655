"""Ranks, the axes of parallelism, and where on them each rank is. Pure values, standard library only."""

from bigsci_launch.topology.axes import AXES, AXIS_NAMES, Axis
from bigsci_launch.topology.coordinates import Coordinate, Topology, UnevenTopology
from bigsci_launch.topology.ranks import compress_ranks, expand_ranks

__all__ = ["AXES", "AXIS_NAMES", "Axis", "Coordinate", "Topology", "UnevenTopology", "compress_ranks", "expand_ranks"]
