"""Draws the screens of `bsl top` as lines of styled text. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from bigsci_launch.printable import one_line
from bigsci_launch.top.rows import TopRow, TopState
from bigsci_launch.units import format_age
from bigsci_launch.watch.show.live import AMBER, BOLD, GREEN, RED, SOFT, LiveView, Style, StyledLine, cut, live_lines

COLUMNS = (("run or job", 18), ("state", 9), (">step", 13), (">s/step", 7), (">loss", 8), ("phase", 5), (">!", 2),
           (">GPU-h", 7))  # fmt: skip
"""The columns, with their widths; numbers are right-aligned. What a wider screen has more goes to `next`."""
NEXT_FROM = 100
WIDEST_NAME = 40
AROUND = 5
"""Lines of the screen that are no rows: title, heads, and what is known of the selected row."""
UNKNOWN = "-"
KEYS = "Enter  s spy  l slow  w why  g logs  c control  x cancel  / find  o sort  q quit"


KEYS_OF_RUN = "Esc back  s spy  l slow  w why  g logs  c control  x cancel  q quit"


def rows_in(height: int) -> int:
    """Return how many rows a screen of so many lines shows."""
    return max(1, height - AROUND)


def list_lines(state: TopState, width: int, height: int, now: float) -> list[StyledLine]:
    """Return the screen of all jobs: `height` lines of at most `width` columns."""
    widths = _widths(width)
    lines: list[StyledLine] = [_title(state, now), [(_heads(widths, width), {**SOFT, "underline": True})]]
    visible = state.visible(rows_in(height))
    lines += [_row(row, widths, width, is_selected=row.key == state.selected) for row in visible]
    if not state.rows:
        lines.append([(_why_empty(state), SOFT)])
    lines += [[] for _ in range(height - AROUND + 2 - len(lines))]
    lines += [*_about(state.row), [(KEYS, SOFT)]]
    return [cut(line, width) for line in lines[:height]]


def _why_empty(state: TopState) -> str:
    if state.asked is None:
        return "asking Slurm, and reading the runs ..."
    return f"nothing has the words {state.words!r}" if state.words else "no runs here, and no jobs of yours in Slurm"


def _title(state: TopState, now: float) -> StyledLine:
    groups = Counter(_group(row) for row in state.rows)
    counts = [f"{groups[name]:,} {name}" for name in ("running", "waiting", "ended", "unknown") if groups[name]]
    findings = sum(bool(row.details and row.details.findings) for row in state.rows)
    asked = "" if state.asked is None else f"  read {format_age(max(0.0, now - state.asked))} ago"
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    words = f"  find: {state.words}" if state.words else ""
    order = "" if state.order == "activity" else f"  by {state.order}"
    title: StyledLine = [("bsl top", BOLD), (f"  {clock}  {', '.join(counts)}", {})]
    if findings:
        title.append((f"  {findings} with findings", {**RED, **BOLD}))
    trouble = f"  Slurm is not known: {state.trouble}" if state.trouble else ""
    return [*title, (f"{words}{order}", SOFT), (trouble or asked, AMBER if trouble else SOFT)]


def _group(row: TopRow) -> str:
    state = row.state
    if state is None or not (state.is_over or state.is_active):
        return "unknown"
    return "ended" if state.is_over else "waiting" if state.is_queued else "running"


def _widths(width: int) -> list[int]:
    fixed = sum(size for _, size in COLUMNS) + len(COLUMNS) - 1
    spare = max(0, min(WIDEST_NAME - COLUMNS[0][1], (width - fixed) // 3)) if width >= NEXT_FROM else 0
    return [COLUMNS[0][1] + spare, *(size for _, size in COLUMNS[1:])]


def _heads(widths: Sequence[int], width: int) -> str:
    heads = [_cell(name, size) for (name, _), size in zip(COLUMNS, widths, strict=True)]
    return " ".join([*heads, "next"] if width >= NEXT_FROM else heads)


def _cell(text: str, size: int) -> str:
    """Return a text in a column of `size`: numbers, which begin with `>`, are right-aligned, and never cut silently."""
    if text.startswith(">"):
        return f"{text[1:]:>{size}}"
    return f"{text:<{size}}" if len(text) <= size else f"{text[: size - 1]}~"


def _row(row: TopRow, widths: Sequence[int], width: int, *, is_selected: bool) -> StyledLine:
    details, state = row.details, row.state
    total = f"/{details.total_steps}" if details and details.total_steps else ""
    cells = [
        one_line(row.name),
        state.value if state is not None else "...",
        f">{details.step}{total}" if details and details.step is not None else f">{UNKNOWN}",
        f">{details.seconds:.3g}" if details and details.seconds is not None else f">{UNKNOWN}",
        f">{details.loss:.5g}" if details and details.loss is not None else f">{UNKNOWN}",
        details.phase if details and details.phase else UNKNOWN,
        f">{len(details.findings)}" if details and details.findings else ">",
        f">{details.gpu_hours:,.4g}" if details and details.gpu_hours is not None else f">{UNKNOWN}",
    ]
    shown = [_cell(text, size) for text, size in zip(cells, widths, strict=True)]
    if width >= NEXT_FROM:
        shown.append(one_line(details.next) if details else "")
    text = " ".join(shown)
    if is_selected:
        return [(f"{text:<{width}}", {"reverse": True})]
    place = widths[0] + 1
    return [
        (text[:place], {}),
        (text[place : place + widths[1]], _style(row)),
        (text[place + widths[1] :], _found(row)),
    ]


def _style(row: TopRow) -> Style:
    group = _group(row)
    return {"running": GREEN, "waiting": AMBER, "unknown": SOFT}.get(group, {})


def _found(row: TopRow) -> Style:
    return RED if row.details is not None and row.details.findings else {}


def _about(row: TopRow | None) -> list[StyledLine]:
    """Return two lines about the selected row: what is found, or what it is; and what happens next."""
    if row is None:
        return [[], []]
    details = row.details
    job = row.job or (details.job if details else None)
    what = [one_line(row.name), details.label if details else "", job.hostlist if job else ""]
    first: StyledLine = [("  ".join(filter(None, what)), BOLD)]
    if details and details.findings:
        first.append((f"  {one_line(details.findings[-1])}", RED))
    coming = "..." if details is None else one_line(details.next) or UNKNOWN
    return [first, [("next: ", SOFT), (coming, {})]]


def run_lines(view: LiveView, row: TopRow, width: int, height: int) -> list[StyledLine]:
    """Return the screen of one run: as `bsl watch --live`, and below it what happens next."""
    lines = live_lines(view, width, height - 3)
    lines += [[] for _ in range(height - 2 - len(lines))]
    return [*lines, *(cut(line, width) for line in (_about(row)[1], [(KEYS_OF_RUN, SOFT)]))]
