"""A line of a screen: parts of text, each with its style in the words of click."""

from __future__ import annotations

from itertools import takewhile
from typing import Any
from unicodedata import category, east_asian_width

Style = dict[str, Any]
StyledLine = list[tuple[str, Style]]

RED: Style = {"fg": "red"}
AMBER: Style = {"fg": "yellow"}
GREEN: Style = {"fg": "green"}
SOFT: Style = {"dim": True}
BOLD: Style = {"bold": True}


def cells(text: str) -> int:
    """Return how many columns of a terminal a printable text takes: some scripts have letters of two."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def first_cells(text: str, width: int) -> str:
    """Return as much of a printable text as fits into `width` columns."""
    if text.isascii():
        return text[: max(0, width)]
    shown = []
    for letter in text:
        width -= _cells_of(letter)
        if width < 0:
            break
        shown.append(letter)
    return "".join(shown)


def changed_cells(before: StyledLine, line: StyledLine) -> int | None:
    """Return how many columns from the left must be drawn again, in whole parts of a line; None if all must."""
    total = sum(cells(text) for text, _ in line)
    if total != sum(cells(text) for text, _ in before):
        return None
    same = takewhile(lambda parts: parts[0] == parts[1], zip(reversed(before), reversed(line), strict=False))
    return total - sum(cells(text) for (text, _), _ in same)


def _cells_of(letter: str) -> int:
    return 0 if category(letter) in ("Mn", "Me") else 2 if east_asian_width(letter) in "WF" else 1


def cut(line: StyledLine, width: int) -> StyledLine:
    """Return the line without what is right of the screen, and without what a terminal would obey."""
    shown: StyledLine = []
    for text, style in line:
        plain = "".join(letter if letter.isprintable() else " " for letter in text)
        part = first_cells(plain, width)
        # What is behind a letter that does not fit is not shown either.
        width = width - cells(part) if part == plain else 0
        if part:
            shown.append((part, style))
    return shown
