"""Ranks and coordinates in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bigsci_launch.topology.axes import AXIS_NAMES
from bigsci_launch.topology.coordinates import Coordinate
from bigsci_launch.topology.ranks import compress_ranks

Box = Mapping[str, tuple[int, ...]]
"""Indices on each axis: the coordinates that have one of them on every axis."""


def compress_coordinates(coordinates: Iterable[Coordinate]) -> str:
    """Coordinates as boxes: `dp0-1 pp3 tp0-3`; what is no box becomes several, separated by semicolons."""
    return "; ".join(_box_words(box) for box in find_boxes(coordinates))


def find_boxes(coordinates: Iterable[Coordinate]) -> list[Box]:
    """Few boxes that hold exactly these coordinates, in the order of their ranks."""
    ordered = sorted(coordinates, key=lambda at: tuple(at[axis] for axis in reversed(AXIS_NAMES)))
    boxes: list[Box] = [{axis: (at[axis],) for axis in at.axes} for at in ordered]
    for axis in AXIS_NAMES:
        boxes = _merge(boxes, axis)
    return boxes


def _merge(boxes: Iterable[Box], axis: str) -> list[Box]:
    """The boxes, where those that differ on `axis` alone have become one."""
    found: dict[tuple[tuple[str, tuple[int, ...]], ...], dict[str, tuple[int, ...]]] = {}
    for box in boxes:
        same = found.setdefault(tuple((name, box[name]) for name in box if name != axis), dict(box))
        if axis in box and same[axis] != box[axis]:
            same[axis] += box[axis]
    return list(found.values())


def _box_words(box: Box) -> str:
    return " ".join(f"{axis}{compress_ranks(indices)}" for axis, indices in box.items())
