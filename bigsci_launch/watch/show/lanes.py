"""The steps of all ranks as SVG text: ranks x steps as a heat map, and one step with a lane for each rank. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from bigsci_launch.charts import Area, Scale, text
from bigsci_launch.slow.picture import WAITS, StepPicture, WorkRow
from bigsci_launch.slow.straggler import StepPhase
from bigsci_launch.topology.naming import count_ranks

WIDTH, LEFT, ROW, GAP = 1100, 170, 15, 2
LEVELS = (0.05, 0.1, 0.2, 0.4)
"""By how much longer than its peers a rank works in a step from one shade to the next."""
MOST_TICKS = 12
STEP_STYLE = """
.cell { fill: var(--card); } .less { fill: #7fb2e5; } .more1 { fill: #f5d9a8; } .more2 { fill: #f0b35e; }
.more3 { fill: #e07b39; } .more4 { fill: #b8321f; }
.in-data { fill: #8e6bbf; } .in-forward { fill: #2d7dd2; } .in-backward { fill: #1f4f8f; }
.in-optimizer { fill: #1b7f4b; }
.in-save { fill: #b0892b; } .in-evaluation { fill: #6f8f3f; } .in-garbage-collection { fill: #c0392b; }
.in-unknown { fill: #8a949c; } .in-waits { fill: var(--card); stroke: var(--line); stroke-width: .5; }
svg text.row { font-size: 10px; } .keys span { margin-right: 1.1rem; white-space: nowrap; }
.keys svg { width: .8rem; height: .8rem; vertical-align: -1px; margin-right: .3rem; }
"""
SHADES = (
    ("less", "at least 5 % less than its peers"),
    ("cell", "as long"),
    ("more1", "5 % longer"),
    ("more2", "10 %"),
    ("more3", "20 %"),
    ("more4", "40 % and more"),
)


def draw_heat(picture: StepPicture) -> str:
    """Return ranks x steps: how much longer than its peers a rank worked in each."""
    area = _area(len(picture.rows))
    x = Scale(0, max(1, len(picture.steps)), LEFT, area.end)
    body = "".join(_row(area, x, picture, at, row) for at, row in enumerate(picture.rows)) + _steps(area, x, picture)
    of = f"the {len(picture.rows)} of {count_ranks(picture.num_ranks)} that work longest"
    which = of if len(picture.rows) < picture.num_ranks else count_ranks(picture.num_ranks)
    words = f"work in each step, next to ranks that do the same: {which}"
    return _figure(words, _keys((css_class, said) for css_class, said in SHADES), area.svg(body, words, ""))


def _row(area: Area, x: Scale, picture: StepPicture, at: int, row: WorkRow) -> str:
    y = area.top + at * ROW
    cells = zip(picture.steps, row.work_ms, row.usual_ms, strict=False)
    drawn = "".join(_cell(x(each), y, x(1) - x(0), row.name, *cell) for each, cell in enumerate(cells))
    return _name(y, row.name) + drawn


def _cell(left: float, y: float, width: float, name: str, step: int, work_ms: float, usual_ms: float) -> str:
    more = work_ms / usual_ms - 1 if usual_ms > 0 else 0.0
    next_to = f", its peers {usual_ms:.3g} ms" if usual_ms > 0 else ", no rank does the same"
    title = escape(f"{name}, step {step}: {work_ms:.3g} ms of work{next_to}")
    return _box(left, y, width - 0.5, shade(more), title)


def shade(more: float) -> str:
    """Return the class of a cell whose rank worked by that part longer than its peers."""
    level = sum(more >= limit for limit in LEVELS)
    return f"more{level}" if level else "less" if more <= -LEVELS[0] else "cell"


def draw_lanes(picture: StepPicture) -> str:
    """Return what some ranks did in one step, each in a lane."""
    ends = [span.end_ms for lane in picture.lanes for span in lane.spans]
    if not ends:
        return ""
    area = _area(len(picture.lanes))
    x = Scale(min(0.0, *(span.begin_ms for lane in picture.lanes for span in lane.spans)), max(ends), LEFT, area.end)
    body = ""
    for at, lane in enumerate(picture.lanes):
        y = area.top + at * ROW
        body += _name(y, lane.name)
        for span in lane.spans:
            title = escape(f"{lane.name}: {span.what}, {span.end_ms - span.begin_ms:.3g} ms")
            body += _box(x(span.begin_ms), y, x(span.end_ms) - x(span.begin_ms), _css(span.what), title)
    body += "".join(area.under(x(tick), f"{tick:g} ms") for tick in x.ticks())
    kinds = {span.what for lane in picture.lanes for span in lane.spans}
    keys = _keys((_css(what), what) for what in (*map(str, StepPhase), WAITS) if what in kinds)
    return _figure(f"step {picture.lanes_of}, the typical one of these", keys, area.svg(body, "one step", ""))


def _css(what: str) -> str:
    return "in-" + re.sub(r"[^a-z]+", "-", what.lower())


def _area(rows: int) -> Area:
    return Area(WIDTH, rows * ROW + 34, left=LEFT, right=16, top=6, bottom=28)


def _steps(area: Area, x: Scale, picture: StepPicture) -> str:
    every = max(1, len(picture.steps) // MOST_TICKS)
    return "".join(area.under(x(at + 0.5), f"{step}") for at, step in enumerate(picture.steps) if at % every == 0)


def _name(y: float, name: str) -> str:
    return text(LEFT - 8, y + ROW - 4, name, "end")


def _box(left: float, y: float, width: float, css_class: str, title: str) -> str:
    size = f'width="{max(0.4, width):.1f}" height="{ROW - GAP}"'
    return f'<rect class="{css_class}" x="{left:.1f}" y="{y:.1f}" {size}><title>{title}</title></rect>'


def _keys(classes: Iterator[tuple[str, str]]) -> str:
    boxes = (
        f'<span><svg viewBox="0 0 10 10"><rect class="{css_class}" width="10" height="10"/></svg>{escape(said)}</span>'
        for css_class, said in classes
    )
    return f'<p class="soft keys">{"".join(boxes)}</p>'


def _figure(words: str, keys: str, drawn: str) -> str:
    return f"<figure><figcaption>{escape(words)}</figcaption>{keys}{drawn}</figure>"
