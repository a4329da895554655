"""Describes sets of places in the usual words for ranks: `pp11`. An axis that is fully covered is omitted."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from bigsci_launch.topology.naming import EVERY_RANK, name_box
from bigsci_launch.weights.files.tensors import PLACE_AXES, Place

MAX_LISTED = 4


def describe_places(places: Collection[Place], holders: Collection[Place], everywhere: Collection[Place]) -> str:
    """Describe `places` exactly and as briefly as possible: `pp1 tp0-1`, or `every rank`.

    `holders` are all places that have the tensors in question, `everywhere` all places that were compared. An axis
    with only one index is omitted. The text is empty if no place is known, or if there is only one.
    """
    if not is_product(places, holders):
        return _listed(places)
    return describe_range(places, everywhere) or (EVERY_RANK if _has_several(places) else "")


def is_product(places: Collection[Place], holders: Collection[Place]) -> bool:
    """Whether every holder whose indices occur in `places` is one of them: the indices then define the places."""
    chosen = {axis: _indices(places, axis) for axis in PLACE_AXES}
    return not {place for place in holders if all(place[axis] in chosen[axis] for axis in PLACE_AXES)} - set(places)


def describe_range(places: Collection[Place], everywhere: Collection[Place]) -> str:
    """Describe the range of indices of `places`, on the axes that they do not cover fully."""
    here, known = ({axis: _known(each, axis) for axis in PLACE_AXES} for each in (places, everywhere))
    return name_box({axis: here[axis] for axis in PLACE_AXES if here[axis] and here[axis] != known[axis]})


def _has_several(places: Collection[Place]) -> bool:
    return any(len(_known(places, axis)) > 1 for axis in PLACE_AXES)


def _known(places: Iterable[Place], axis: str) -> set[int]:
    return {index for index in _indices(places, axis) if index is not None}


def _indices(places: Iterable[Place], axis: str) -> set[int | None]:
    return {place[axis] for place in places}


def _listed(places: Collection[Place]) -> str:
    texts = sorted(str(place) for place in places)
    more = f" and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return "; ".join(texts[:MAX_LISTED]) + more
