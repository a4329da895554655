"""The cells of one measured row, read as numbers, names and choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Cells:
    """The original cells of a row, its place for messages, and the assumed values of empty cells."""

    cells: dict[str, str]
    where: str
    assumed: dict[str, str] = field(default_factory=dict)

    def text(self, column: str) -> str:
        return (self.cells.get(column) or self.assumed.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """Return the number in a cell, or None."""
        try:
            return float(self.text(column))
        except ValueError:
            return None

    def flag(self, column: str) -> bool:
        return self.number(column) == 1

    def size(self, column: str) -> int:
        """Return the positive whole number in a cell.

        Raises:
            ValueError: the cell is empty or holds something else.
        """
        number = self.number(column)
        if number is None:
            text = self.text(column)
            raise ValueError(f"{column} is not a number: {text!r}" if text else f"{column} is empty")
        if number < 1 or number != int(number):
            raise ValueError(f"{column} is {self.text(column)}, not a positive whole number")
        return int(number)

    def optional_size(self, column: str) -> int | None:
        """Return the positive whole number in a cell, or None if the cell is empty or 0."""
        return None if not self.text(column) or self.number(column) == 0 else self.size(column)

    def choice(self, column: str, values: Mapping[str, _Value], default: _Value) -> _Value:
        """Return what the word in a cell means, or the default of an empty one.

        Raises:
            ValueError: the word is none of `values`, so what it says is not modelled.
        """
        text = self.text(column)
        if not text:
            return default
        if text not in values:
            raise ValueError(f"{column} {text!r} is not modelled; {', '.join(values)} are")
        return values[text]
