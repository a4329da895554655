"""The output of a command on the screen of `bsl top`, which can be scrolled. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bigsci_launch.printable import printable
from bigsci_launch.styled_lines import BOLD, SOFT, StyledLine, cut, first_cells

MOST_LINES = 5000
"""If there are more, the last are kept."""


class CommandOutput:
    """What a command has printed so far, in lines of at most `width` columns. The newest are shown, until they are
    scrolled back."""

    def __init__(self, command: str, width: int) -> None:
        self.command, self._width = command, max(1, width)
        self.code: int | None = None
        self.lines: list[str] = []
        self._torn = ""
        self._above: int | None = None

    def add(self, text: str) -> None:
        *lines, self._torn = (self._torn + text).split("\n")
        self.lines = [*self.lines, *(part for line in lines for part in folded(line, self._width))][-MOST_LINES:]

    def end(self, code: int) -> None:
        """Note the exit code of the command."""
        self.code = code
        if self._torn:
            self.lines += folded(self._torn, self._width)
            self._torn = ""

    def scroll(self, by: int, height: int) -> None:
        """Move `by` lines down; at the end, new lines are followed again."""
        lowest = max(0, len(self.lines) - _room(height))
        above = lowest if self._above is None else self._above
        moved = min(max(0, above + by), lowest)
        self._above = None if moved == lowest else moved

    def visible(self, height: int) -> Sequence[str]:
        room = _room(height)
        first = max(0, len(self.lines) - room) if self._above is None else self._above
        return self.lines[first : first + room]


def folded(line: str, width: int) -> Iterator[str]:
    """Yield a line in parts that a terminal of `width` columns shows whole; what it would obey becomes visible."""
    rest = printable(line).expandtabs()
    while True:
        part = first_cells(rest, width) or rest[:1]
        yield part
        rest = rest[len(part) :]
        if not rest:
            return


def _room(height: int) -> int:
    return max(1, height - 2)


def output_lines(output: CommandOutput, width: int, height: int) -> list[StyledLine]:
    """Return the screen: the command, its output, and whether it is done."""
    state = "runs ...  Esc ends it" if output.code is None else f"exit code {output.code}  Esc goes back"
    lines: list[StyledLine] = [[(output.command, BOLD)]]
    lines += [[(line, {})] for line in output.visible(height)]
    lines += [[] for _ in range(height - 1 - len(lines))]
    return [cut(line, width) for line in [*lines, [(state, SOFT)]]]
