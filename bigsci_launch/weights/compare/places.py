"""Sets of places in words, as ranks are named everywhere: `pp11`, an axis that is covered completely left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from bigsci_launch.topology.words import EVERY_RANK, name_box
from bigsci_launch.weights.files.tensors import PLACE_AXES, Place

MAX_LISTED = 4


def describe_places(places: Collection[Place], holders: Collection[Place], everywhere: Collection[Place]) -> str:
    """Where `places` are, as short as it is exact: `pp1 tp0-1`, or `every rank`.

    `holders` are all places that hold the tensors in question, `everywhere` all places that were compared: an axis of
    one index is not worth a word. An empty text: nothing is known, or there is only one place.
    """
    if not is_product(places, holders):
        return _listed(places)
    return describe_range(places, everywhere) or (EVERY_RANK if _has_several(places) else "")


def is_product(places: Collection[Place], holders: Collection[Place]) -> bool:
    """Whether `places` are all of the holders whose indices they use: then naming the indices names the places."""
    chosen = {axis: _indices(places, axis) for axis in PLACE_AXES}
    return not {place for place in holders if all(place[axis] in chosen[axis] for axis in PLACE_AXES)} - set(places)


def describe_range(places: Collection[Place], everywhere: Collection[Place]) -> str:
    """The indices within which `places` are, on the axes that this narrows."""
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
