"""Sets of places in words: `pp 11, every tp and dp`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from bigsci_launch.topology import compress_ranks
from bigsci_launch.weights.files.tensors import Place

AXES = ("pp", "tp", "dp")
MAX_LISTED = 4


def describe_places(places: Collection[Place], holders: Collection[Place], everywhere: Collection[Place]) -> str:
    """Where `places` are, as short as it is exact.

    `holders` are all places that hold the tensors in question, `everywhere` all places that were compared: an axis of
    one index is not worth a word. An empty text: nothing is known, or there is only one place.
    """
    if not is_product(places, holders):
        return _listed(places)
    parts, whole = _axes(places, everywhere)
    return ", ".join([*parts, f"every {' and '.join(whole)}"] if whole else parts)


def is_product(places: Collection[Place], holders: Collection[Place]) -> bool:
    """Whether `places` are all of the holders whose indices they use: then naming the indices names the places."""
    chosen = {axis: _indices(places, axis) for axis in AXES}
    return not {place for place in holders if all(_index(place, axis) in chosen[axis] for axis in AXES)} - set(places)


def describe_range(places: Collection[Place], everywhere: Collection[Place]) -> str:
    """The indices within which `places` lie, on the axes that this narrows."""
    return ", ".join(_axes(places, everywhere)[0])


def _axes(places: Collection[Place], everywhere: Collection[Place]) -> tuple[list[str], list[str]]:
    """Texts of the axes of which some indices are used, and names of those of which all are."""
    parts, whole = [], []
    for axis in AXES:
        known = _indices(everywhere, axis) - {None}
        here = {index for index in _indices(places, axis) if index is not None}
        if len(known) > 1 and here == known:
            whole.append(axis)
        elif len(known) > 1 and here:
            parts.append(f"{axis} {compress_ranks(here)}")
    return parts, whole


def _index(place: Place, axis: str) -> int | None:
    index: int | None = getattr(place, axis)
    return index


def _indices(places: Iterable[Place], axis: str) -> set[int | None]:
    return {_index(place, axis) for place in places}


def _listed(places: Collection[Place]) -> str:
    texts = sorted(str(place) for place in places)
    more = f" and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return "; ".join(texts[:MAX_LISTED]) + more
