"""Ranks and their places in words: one dialect for every sentence.

- Ranks: `rank 3`, `ranks 0-3,7`, `1024 ranks (0,8,16,...)`.
- Places: `dp0-1 pp3 tp0-3`, the name of an axis with a list of indices. An axis that is covered completely is left out:
  `pp3` is the whole stage. `in pp3` is a part of it that has no shorter name. A single rank has its whole coordinate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sized

from bigsci_launch.topology.axes import WRITTEN
from bigsci_launch.topology.coordinates import Coordinate, Topology
from bigsci_launch.topology.parts import find_boxes, part_of, shared_by
from bigsci_launch.topology.ranks import compress_ranks

MAX_LIST = 60
"""Characters that a list of ranks may take within a sentence."""
EVERY_RANK = "every rank"
_PLURALS = {"is": "are", "was": "were", "has": "have", "does": "do", "goes": "go"}


def name_ranks(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0-3,7`, `1024 ranks (0,8,16,...)` where the list would fill the screen."""
    text = compress_ranks(ranks)
    if _is_long(text):
        return f"{len(ranks)} ranks ({text[:MAX_LIST].rpartition(',')[0]},...)"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _is_long(text: str) -> bool:
    return len(text) > MAX_LIST


def count_ranks(ranks: Sized | int) -> str:
    """`1 rank`, `7 ranks`."""
    count = ranks if isinstance(ranks, int) else len(ranks)
    return "1 rank" if count == 1 else f"{count} ranks"


def agree(words: str, subjects: Sized | int) -> str:
    """The words, whose first is a verb in the singular, for that many subjects: `does not move`, `do not move`."""
    if (subjects if isinstance(subjects, int) else len(subjects)) == 1:
        return words
    verb = words.partition(" ")[0].rstrip(":")
    return _PLURALS.get(verb, verb.removesuffix("s")) + words[len(verb) :].replace("its ", "their ")


def counted(subjects: Sized | int, words: str) -> str:
    """`1 rank waits`, `7 ranks wait`."""
    return f"{count_ranks(subjects)} {agree(words, subjects)}"


def name_box(box: Mapping[str, Iterable[int]]) -> str:
    """`dp0-1 pp3 tp0-3`."""
    names = (axis.name for axis in reversed(WRITTEN))
    return " ".join(f"{axis}{compress_ranks(box[axis])}" for axis in names if axis in box)


def name_coordinates(coordinates: Iterable[Coordinate]) -> str:
    """Coordinates on all axes: `dp0-1 pp3 tp0-3`; what is no box becomes several, separated by semicolons."""
    return "; ".join(name_box(box) for box in find_boxes(coordinates))


def name_part(ranks: Collection[int], topology: Topology) -> str:
    """Which part of the grid `ranks` are: `pp3 tp0-1`; `in pp3`, what they share, where they are no product of indices.

    A single rank has its whole coordinate. Empty where they are all ranks, or share nothing.
    """
    if len(ranks) == 1 and max(ranks) < topology.world_size:
        return str(topology.coordinate(max(ranks)))
    part = part_of(ranks, topology)
    if part is not None:
        return name_box(part)
    shared = shared_by(ranks, topology)
    return f"in {name_box(shared)}" if shared else ""


def name_ranks_and_part(ranks: Collection[int], topology: Topology | None) -> str:
    """`ranks 4-5 (dp0 pp1)`, `96 ranks (tp0)`: where the list would be cut, the part says more."""
    part = name_part(ranks, topology) if topology else ""
    if not part:
        return name_ranks(ranks)
    return f"{count_ranks(ranks) if _is_long(compress_ranks(ranks)) else name_ranks(ranks)} ({part})"
