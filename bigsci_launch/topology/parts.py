"""Sets of ranks as parts of the grid: boxes, which have an own list of indices on each axis."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from bigsci_launch.topology.axes import AXIS_NAMES
from bigsci_launch.topology.coordinates import Coordinate, Topology

Box = Mapping[str, tuple[int, ...]]
"""Indices on some axes: the coordinates that have one of them on each of these axes."""


def part_of(ranks: Collection[int], topology: Topology) -> Box | None:
    """The box that `ranks` are, with the axes that they do not cover completely; None where they are no box."""
    if not ranks or max(ranks) >= topology.world_size:
        return None
    used = _indices(topology.coordinate(rank) for rank in ranks)
    if math.prod(map(len, used.values())) != len(set(ranks)):
        return None
    return {axis: indices for axis, indices in used.items() if len(indices) < topology[axis]}


def shared_by(ranks: Collection[int], topology: Topology) -> Box:
    """The indices that all of `ranks` have in common."""
    if not ranks or max(ranks) >= topology.world_size:
        return {}
    used = _indices(topology.coordinate(rank) for rank in ranks)
    return {axis: indices for axis, indices in used.items() if len(indices) == 1 and topology[axis] > 1}


def find_boxes(coordinates: Iterable[Coordinate]) -> list[Box]:
    """Few boxes that hold exactly these coordinates, in the order of their ranks."""
    ordered = sorted(coordinates, key=lambda at: tuple(at[axis] for axis in reversed(AXIS_NAMES)))
    boxes: list[Box] = [{axis: (at[axis],) for axis in at.axes} for at in ordered]
    for axis in AXIS_NAMES:
        boxes = _merge(boxes, axis)
    return boxes


def _indices(coordinates: Iterable[Coordinate]) -> dict[str, tuple[int, ...]]:
    """All indices that are used on each axis."""
    found = list(coordinates)
    columns = zip(*(at.indices for at in found), strict=True)
    return {axis: tuple(sorted(set(column))) for axis, column in zip(found[0].axes, columns, strict=True)}


def _merge(boxes: Iterable[Box], axis: str) -> list[Box]:
    """The boxes, where those that differ on `axis` alone have become one."""
    found: dict[tuple[tuple[str, tuple[int, ...]], ...], dict[str, tuple[int, ...]]] = {}
    for box in boxes:
        same = found.setdefault(tuple((name, box[name]) for name in box if name != axis), dict(box))
        if axis in box and same[axis] != box[axis]:
            same[axis] += box[axis]
    return list(found.values())
