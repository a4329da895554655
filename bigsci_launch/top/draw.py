"""Draws the screens of `bsl top` as lines of styled text. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from bigsci_launch.printable import one_line
from bigsci_launch.styled_lines import AMBER, BOLD, GREEN, RED, SOFT, Style, StyledLine, cells, cut, first_cells
from bigsci_launch.top.rows import TopDetails, TopRow, TopState
from bigsci_launch.units import format_age

COLUMNS = (("run or job", 18), ("state", 9), (">step", 13), (">s/step", 7), (">loss", 8), ("phase", 5), (">!", 2),
           (">GPU-h", 7))  # fmt: skip
"""The columns, with their widths; numbers are right-aligned. What a wider screen has more goes to `next`."""
NEXT_FROM = 100
WIDEST_NAME = 40
AROUND = 5
"""Lines of the screen that are no rows: title, heads, and what is known of the selected row."""
UNKNOWN = "-"
KEYS = "Enter  s spy  l slow  w why  g logs  c control  x cancel  / find  o sort  q quit"


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
    about = about_lines(state.row)
    if state.trouble:
        about[1] = [(one_line(state.trouble), AMBER)]
    lines += [*about, [(KEYS, SOFT)]]
    return [cut(line, width) for line in lines[:height]]


def first_lines(width: int, height: int) -> list[StyledLine]:
    """Return the screen on which nothing has been read yet."""
    return list_lines(TopState(), width, height, time.time())


def _why_empty(state: TopState) -> str:
    if state.asked is None:
        return "asking Slurm, and reading the runs ..."
    if state.words:
        return f"nothing has the words {state.words!r}"
    return "no runs here" if state.trouble else "no runs here, and no jobs of yours in Slurm"


def _title(state: TopState, now: float) -> StyledLine:
    groups = Counter(_group(row) for row in state.rows)
    counts = [f"{groups[name]:,} {name}" for name in ("running", "waiting", "ended", "unknown") if groups[name]]
    findings = sum(bool(row.details and row.details.findings) for row in state.rows)
    asked = "" if state.asked is None else f"  read {format_age(max(0.0, now - state.asked))} ago"
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    words = f"  find: {state.words}" if state.words else ""
    order = "" if state.order == "activity" else f"  by {state.order}"
    # What changes each second is first: only this is drawn again.
    title: StyledLine = [("bsl top", BOLD), (f"  {clock}{asked}", SOFT), (f"  {', '.join(counts)}", {})]
    if findings:
        title.append((f"  {findings} with findings", {**RED, **BOLD}))
    if state.trouble:
        title.append(("  no answer from Slurm", AMBER))
    return [*title, (f"{words}{order}", SOFT)]


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
    heads = [_cell(name.lstrip(">"), size, is_number=name.startswith(">"))
             for (name, _), size in zip(COLUMNS, widths, strict=True)]  # fmt: skip
    return " ".join([*heads, "next"] if width >= NEXT_FROM else heads)


def _cell(text: str, size: int, *, is_number: bool) -> str:
    """Return a text in a column of `size`: numbers are right-aligned, and never cut."""
    if is_number:
        return f"{text:>{size}}"
    shown = text if cells(text) <= size else f"{first_cells(text, size - 1)}~"
    return shown + " " * (size - cells(shown))


def _row(row: TopRow, widths: Sequence[int], width: int, *, is_selected: bool) -> StyledLine:
    details, state = row.details, row.state
    texts = [
        one_line(row.name),
        state.value if state is not None else "...",
        _step(details, widths[2]),
        UNKNOWN if details is None or details.seconds is None else f"{details.seconds:.3g}",
        UNKNOWN if details is None or details.loss is None else f"{details.loss:.5g}",
        details.phase if details and details.phase else UNKNOWN,
        str(len(details.findings)) if details and details.findings else "",
        UNKNOWN if details is None or details.gpu_hours is None else f"{details.gpu_hours:,.4g}",
    ]
    name, job, *numbers = (
        _cell(text, size, is_number=head.startswith(">"))
        for text, size, (head, _) in zip(texts, widths, COLUMNS, strict=True)
    )
    if width >= NEXT_FROM:
        numbers.append(one_line(details.next) if details else "")
    line: StyledLine = [(f"{name} ", {}), (f"{job} ", _style(row)), (" ".join(numbers), _found(row))]
    if is_selected:
        text = "".join(part for part, _ in line)
        return [(text + " " * (width - cells(text)), {"reverse": True})]
    return line


def _step(details: TopDetails | None, size: int) -> str:
    if details is None or details.step is None:
        return UNKNOWN
    whole = f"{details.step}/{details.total_steps}" if details.total_steps else ""
    return whole if whole and len(whole) <= size else str(details.step)


def _style(row: TopRow) -> Style:
    group = _group(row)
    return {"running": GREEN, "waiting": AMBER, "unknown": SOFT}.get(group, {})


def _found(row: TopRow) -> Style:
    return RED if row.details is not None and row.details.findings else {}


def about_lines(row: TopRow | None) -> list[StyledLine]:
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
