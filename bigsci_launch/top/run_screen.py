"""The screen of one run in `bsl top`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bigsci_launch.styled_lines import SOFT, StyledLine, cut
from bigsci_launch.top.draw import about_lines
from bigsci_launch.top.rows import TopRow
from bigsci_launch.watch.show.live import LiveView, live_lines, read_live_view

KEYS = "Esc back  s spy  l slow  w why  g logs  c control  x cancel  q quit"


def read_run_screen(row: TopRow) -> Callable[[int, int], list[StyledLine]]:
    """Read a run, and return what draws it for a width and a height.

    Raises:
        RunDirError: the run has no attempt, or cannot be read.
    """
    assert row.run is not None
    return partial(run_lines, read_live_view(row.run, row.job), row)


def run_lines(view: LiveView, row: TopRow, width: int, height: int) -> list[StyledLine]:
    """Return the screen of a run: as `bsl watch --live`, and below it what happens next."""
    lines = live_lines(view, width, height - 3)
    lines += [[] for _ in range(height - 2 - len(lines))]
    return [*lines, *(cut(line, width) for line in (about_lines(row)[1], [(KEYS, SOFT)]))]
