"""Renders the grid of coordinates as text: one letter per rank, or per several if ranks outnumber the columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.evidence.stack_classes import StackClass
from bigsci_launch.topology import Topology

MEANINGS = {"!": "suspect", "?": "not read", "x": "ended", "*": "other classes"}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
OTHER_CLASS, SUSPECT, UNREAD, GONE = "*", "!", "?", "x"
_BY_ODDNESS = LETTERS + OTHER_CLASS + GONE + UNREAD + SUSPECT


@dataclass(frozen=True, slots=True)
class TextGrid:
    """Rows of marks, each with its name, and a caption that explains them."""

    caption: str
    rows: tuple[tuple[str, str], ...]


def class_letter(index: int) -> str:
    """Return the letter of the class at `index`, counted from the largest class."""
    return LETTERS[index] if index < len(LETTERS) else OTHER_CLASS


def rank_marks(evidence: Evidence, classes: Sequence[StackClass], suspects: Iterable[int]) -> dict[int, str]:
    """Return the mark of each rank: the letter of its class, or that it is a suspect, has ended or was not read."""
    marks = {seen.rank: GONE if seen.is_gone else UNREAD for seen in evidence.ranks}
    for index, found in enumerate(classes):
        marks |= dict.fromkeys(found.ranks, class_letter(index))
    return marks | dict.fromkeys(suspects, SUSPECT)


def make_text_grid(
    topology: Topology | None, marks: Mapping[int, str], columns: int, max_rows: int, order: str = _BY_ODDNESS
) -> TextGrid:
    """Return a grid of at most `max_rows` rows; ranks that share a place show the most unusual of their marks, which is
    the last of them in `order`."""
    if topology is None or not topology.is_grid or topology.world_size != len(marks):
        return _in_order(marks, columns, max_rows, order)
    width, in_block = topology.stride("pp"), topology.stride("dp")
    per_mark = 1 if width + topology.dp - 1 <= columns else in_block
    while -(-width // per_mark) > columns:
        per_mark *= 2
    stages = -(-topology.pp // max_rows)
    blank = in_block if per_mark == 1 and in_block > 1 else 0
    rows = []
    for first in range(0, topology.pp, stages):
        last = min(first + stages, topology.pp)
        lines = [[marks[stage * width + at] for at in range(width)] for stage in range(first, last)]
        name = f"pp{first}" if stages == 1 else f"pp{first}-{last - 1}"
        rows.append((name, _squeeze(list(zip(*lines, strict=True)), per_mark, blank, order)))
    return TextGrid(_caption(topology, per_mark, stages), tuple(rows))


def _caption(topology: Topology, per_mark: int, stages: int) -> str:
    if per_mark == 1 and stages == 1:
        what = "one letter per rank"
    else:
        what = f"one letter per {per_mark * stages} ranks, for the most unusual of them"
    return f"rows: pipeline stages; columns: replicas, dp0 to dp{topology.dp - 1}; {what}"


def _in_order(marks: Mapping[int, str], columns: int, max_rows: int, order: str) -> TextGrid:
    """Return the grid in rank order, for ranks without known coordinates."""
    ranks = sorted(marks)
    columns = max(8, min(columns * 8 // 9 // 8 * 8, 64))
    per_mark = 1
    while len(ranks) > per_mark * columns * max_rows:
        per_mark *= 2
    rows = []
    for start in range(0, len(ranks), columns * per_mark):
        part = ranks[start : start + columns * per_mark]
        places = [(marks[rank],) for rank in part]
        rows.append((str(part[0]), _squeeze(places, per_mark, 8 if per_mark == 1 else 0, order)))
    what = "one letter per rank"
    if per_mark > 1:
        what = f"one letter per {per_mark} ranks, for the most unusual of them"
    return TextGrid(f"ranks in order; {what}", tuple(rows))


def _squeeze(places: Sequence[Sequence[str]], per_mark: int, blank_after: int, order: str) -> str:
    """Return one mark for every `per_mark` places, with a blank after every `blank_after` marks."""
    merged = "".join(
        max((mark for place in places[at : at + per_mark] for mark in place), key=order.index)
        for at in range(0, len(places), per_mark)
    )
    if not blank_after:
        return merged
    return " ".join(merged[at : at + blank_after] for at in range(0, len(merged), blank_after))
